"""SkyPilot's own parser takes the file that is for it."""

import json
from pathlib import Path

import pytest
import yaml
from programs import run_program, run_python

_FILE = Path(__file__).parents[2] / "cluster" / "skypilot.yaml"
_SKYPILOT = "skypilot==0.14.1"
_PARSE = """
import json, sys, sky, yaml
config = yaml.safe_load(open(sys.argv[1]))
task = sky.Task.from_yaml_config(config, None, [(name, "given") for name in config["secrets"]])
resources, = task.resources
print(json.dumps([task.num_nodes, resources.accelerators, resources.use_spot, sorted(task.envs), sorted(task.secrets)]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_skypilot_takes_its_file(tmp_path: Path) -> None:
    """In an environment of its own: SkyPilot's packages are not raypp's."""
    run_python("-m", "venv", str(tmp_path / "sky"))
    python = str(tmp_path / "sky/bin/python")
    made = run_program(python, "-m", "pip", "install", "-q", _SKYPILOT, code=None)
    if made.returncode:
        pytest.skip(f"{_SKYPILOT} could not be installed: {made.stderr.strip()[-200:]}")
    path, config = tmp_path / "task.yaml", yaml.safe_load(_FILE.read_text())
    for wanted, key in ((0, "num_nodes"), (1, "num_node")):  # a wrong key is refused
        path.write_text(yaml.safe_dump({**config, key: 2}))
        done = run_program(python, "-c", _PARSE, str(path), code=wanted)
        if not wanted:
            reported = json.loads(done.stdout.splitlines()[-1])
            assert reported == [2, {"L4": 4}, True, sorted(config["envs"]), sorted(config["secrets"])]
