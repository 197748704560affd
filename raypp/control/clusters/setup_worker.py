"""With this script the embedded cluster's raylet starts workers that have a runtime environment.

Ray's own script of this name imports Ray, which takes 0.64 s of CPU time, sets a few variables and
becomes the worker, which imports Ray again. This one does the same without Ray, and runs Ray's for
what it does not know. The name is fixed: the raylet leaves the script out, by its name, where there
is nothing to set up.
"""

import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

_LANGUAGE = "--language="
_CONTEXT = "--serialized-runtime-env-context="
_KNOWN = {"command_prefix", "env_vars", "py_executable", "override_worker_entrypoint", "java_jars"}
_UNSET = re.compile(r"\$\{[A-Z0-9_]+\}")


def worker_command(arguments: Sequence[str]) -> str | None:
    """Returns the shell command of a worker, and sets the variables of its runtime environment.
    Returns None, and nothing is set, if only Ray's own script knows what to do."""
    languages = [argument.removeprefix(_LANGUAGE) for argument in arguments if argument.startswith(_LANGUAGE)]
    contexts = [argument.removeprefix(_CONTEXT) for argument in arguments if argument.startswith(_CONTEXT)]
    if languages != ["PYTHON"] or len(contexts) != 1:
        return None
    context = json.loads(contexts[0])
    if not isinstance(context, dict) or not context.keys() <= _KNOWN:
        return None
    rest = [argument for argument in arguments if not argument.startswith((_LANGUAGE, _CONTEXT))]
    if context.get("override_worker_entrypoint"):
        rest[0] = context["override_worker_entrypoint"]
    os.environ["RAY_CLIENT_MODE"] = "0"  # as the import of Ray does
    for name, value in (context.get("env_vars") or {}).items():  # which may name others and those set before
        os.environ[name] = _UNSET.sub("", os.path.expandvars(value))
    executable = context.get("py_executable") or sys.executable
    return " ".join([*(context.get("command_prefix") or []), "exec", executable, *map(shlex.quote, rest)])


def main() -> None:
    command = worker_command(sys.argv[1:])
    if command is not None:
        os.execvp("bash", ["bash", "-c", command])
    ray = find_spec("ray")
    assert ray is not None and ray.origin is not None
    runpy.run_path(str(Path(ray.origin).parent / "_private" / "workers" / Path(__file__).name), run_name="__main__")


if __name__ == "__main__":
    main()
