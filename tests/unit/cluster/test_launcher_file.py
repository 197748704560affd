"""The launcher file, checked with Ray's own schema and parser."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

_ROOT = Path(__file__).parents[3]
_FILE = _ROOT / "cluster" / "lan.yaml"
sys.path.insert(0, str(_ROOT))


def test_ray_takes_the_launcher_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load(_FILE.read_text())
    prepared = prepare_config(config)
    validate_config(prepared)
    (kind,) = prepared["available_node_types"].values()
    assert kind["max_workers"] == len(config["provider"]["worker_ips"]) == kind["min_workers"]


def test_head_and_workers_have_the_same_environment_and_the_recommended_health_checks() -> None:
    from cluster.testbed import HEALTH_CHECK

    config = yaml.safe_load(_FILE.read_text())
    head, worker = (config[f"{role}_start_ray_commands"][1] for role in ("head", "worker"))
    settings = [dict(re.findall(r"(RAY_\w+)=(\S+?)[ ;]", line.partition(";")[0] + ";")) for line in (head, worker)]
    assert settings[0] == settings[1]
    assert settings[0].items() >= HEALTH_CHECK.items()
