"""The files of Ray's cluster launcher, checked with Ray's own schema and parser, and SkyPilot's."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

_ROOT = Path(__file__).parents[3]
_LAUNCHER = ("lan", "aws", "gcp")
sys.path.insert(0, str(_ROOT))


def document(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((_ROOT / "cluster" / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("name", _LAUNCHER)
def test_ray_takes_the_launcher_file(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = document(name)
    prepared = prepare_config(config)
    validate_config(prepared)
    kinds = prepared["available_node_types"]
    if name == "lan":
        (kind,) = kinds.values()
        assert kind["max_workers"] == len(config["provider"]["worker_ips"]) == kind["min_workers"]
    else:
        # `raypp submit` wants all devices to be there: the autoscaler must not wait for demand.
        assert kinds["worker"]["min_workers"] == kinds["worker"]["max_workers"] == config["max_workers"]
        assert kinds[config["head_node_type"]]["resources"] == {"CPU": 0}


@pytest.mark.parametrize("name", _LAUNCHER)
def test_head_and_workers_have_the_same_environment_and_the_recommended_health_checks(name: str) -> None:
    from cluster.testbed import HEALTH_CHECK

    config = document(name)
    head, worker = (config[f"{role}_start_ray_commands"][1] for role in ("head", "worker"))
    settings = [dict(re.findall(r"(RAY_\w+)=(\S+?)[ ;]", line.partition(";")[0] + ";")) for line in (head, worker)]
    assert settings[0] == settings[1]
    assert settings[0].items() >= HEALTH_CHECK.items()


def test_the_file_for_skypilot_declares_every_variable_that_it_uses() -> None:
    config = document("skypilot")
    used = set(re.findall(r"\$\{?([A-Z_]+)", config["run"])) - {"PATH"}
    of_skypilot = {"SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"}
    assert used - of_skypilot <= {*config["envs"], *config["secrets"]}


def test_every_start_of_ray_has_its_folder_in_a_private_one() -> None:
    files = [*(_ROOT / "cluster").rglob("*.yaml"), *(_ROOT / "docs").glob("*.md"), _ROOT / "docs/tasks/two_sites.md"]
    commands = [
        (path.name, command)
        for path in files
        for command in re.findall(r"(?<!`)\bray start\s+--(?:[^`\n]|\n +--)+", path.read_text())
    ]
    assert len(commands) >= 12
    private = (
        "--temp-dir=$(mktemp -d /tmp/ray-XXXXXX)/r",
        '--temp-dir="$folder/r"',
        "--temp-dir=/home/ray/r",
        "--temp-dir=/var/lib/ray-head/r",
    )
    assert [one for one in commands if not any(option in one[1] for option in private)] == []
    image = (_ROOT / "cluster" / "Dockerfile").read_text()
    assert "chmod 700 /home/ray " in image
    starts = re.findall(
        r"rayStartParams:(?: \{(.*)\}|((?:\n      .*)+))", (_ROOT / "cluster/kuberay/raycluster.yaml").read_text()
    )
    assert [("temp-dir: /home/ray/r" in "".join(one)) for one in starts] == [True, True]
