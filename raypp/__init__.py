"""raypp: Ray-orchestrated, multi-node, pipeline-parallel training of language models. From Python:
`load_job` or `Job`, `plan`, `submit`, `run`, `list_runs`, `queue`. They are imported on first use,
so that `import raypp` takes milliseconds. None of them imports torch or ray."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from raypp.api.checked_job import plan
    from raypp.api.queue import queue
    from raypp.api.run import Run, list_runs, load_job, run, submit
    from raypp.errors import RayppError
    from raypp.job.job import Job

__all__ = ["Job", "RayppError", "Run", "list_runs", "load_job", "plan", "queue", "run", "submit"]
_FROM = {
    "Job": "raypp.job.job",
    "RayppError": "raypp.errors",
    "Run": "raypp.api.run",
    "list_runs": "raypp.api.run",
    "load_job": "raypp.api.run",
    "plan": "raypp.api.checked_job",
    "queue": "raypp.api.queue",
    "run": "raypp.api.run",
    "submit": "raypp.api.run",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'raypp' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_FROM[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
