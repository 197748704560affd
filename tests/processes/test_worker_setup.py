"""The embedded cluster's script that sets up a worker does what Ray's own does, without Ray."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from programs import run_python

from raypp.control.clusters import setup_worker

OURS = str(setup_worker.__file__)
ray = find_spec("ray")
assert ray is not None and ray.origin is not None
RAYS = str(Path(ray.origin).parent / "_private" / "workers" / "setup_worker.py")
SHELL = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv, dict(os.environ)]))
"""
WORKER = ["default_worker.py", "--node-ip-address=127.0.0.2", "--startup-token=4", "it's one", "--", "-x"]


def became(tmp_path: Path, script: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Returns the command of the shell that a script becomes, and its variables."""
    shell = tmp_path / "bash"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "BASE": "/base"}
    argv, variables = json.loads(run_python(script, *arguments, env=environment).stdout)
    return argv[1:], variables


def arguments_for(context: dict[str, Any], language: str = "PYTHON") -> list[str]:
    return [
        *WORKER[:3],
        f"--language={language}",
        f"--serialized-runtime-env-context={json.dumps(context)}",
        *WORKER[3:],
    ]


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"command_prefix": ["cd '/a folder'", "&&"], "env_vars": {}, "py_executable": None, "java_jars": []},
        {"env_vars": {"A": "1", "B": "${A}:$BASE:${NONE}:${none}:$NONE", "PATH_OF_IT": "x:${PATH_OF_IT}"}},
        {"py_executable": "$(echo /opt/python) -I -S client.py"},
        {"override_worker_entrypoint": "/in the container/default_worker.py", "env_vars": None},
        {"py_executable": "python", "java_jars": ["a.jar"]},
    ],
    ids=["nothing", "a prefix", "variables", "an interpreter", "an entrypoint", "jars"],
)
def test_a_worker_gets_the_command_and_the_variables_that_rays_script_gives_it(
    tmp_path: Path, context: dict[str, Any]
) -> None:
    ours = became(tmp_path, OURS, *arguments_for(context))
    assert ours == became(tmp_path, RAYS, *arguments_for(context))
    assert ours[0][0] == "-c" and ours[0][1].endswith("-- -x")


@pytest.mark.parametrize(
    "arguments",
    [
        arguments_for({"java_jars": ["a.jar"]}, language="JAVA"),
        ["--language=PYTHON", *WORKER],
        ["--language", "PYTHON", "--serialized-runtime-env-context", json.dumps({"env_vars": {"A": "1"}}), *WORKER],
    ],
    ids=["another language", "no environment", "another form"],
)
def test_what_it_does_not_know_is_left_to_rays_script(tmp_path: Path, arguments: list[str]) -> None:
    assert setup_worker.worker_command(arguments) is None
    assert became(tmp_path, OURS, *arguments) == became(tmp_path, RAYS, *arguments)


def test_a_part_of_the_environment_that_it_does_not_know_is_left_to_rays_script() -> None:
    before = dict(os.environ)
    assert setup_worker.worker_command(arguments_for({"env_vars": {"A": "1"}, "new_in_ray": True})) is None
    assert dict(os.environ) == before


def test_it_imports_neither_ray_nor_anything_large() -> None:
    context = f"--serialized-runtime-env-context={json.dumps({'py_executable': 'true'})}"
    done = run_python("-X", "importtime", OURS, "--language=PYTHON", context)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "json" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("ray", "raypp", "argparse", "logging")}
