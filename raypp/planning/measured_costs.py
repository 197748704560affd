"""Reads and writes the costs that `raypp plan --measure` measured, with what they are valid for."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MaxLen
from typing_extensions import TypedDict

from raypp.errors import JobError
from raypp.job.job import Job
from raypp.job.load import job_document
from raypp.job.precision import PRECISIONS
from raypp.planning.costs import Costs
from raypp.planning.decide import settle
from raypp.planning.decision import Facts, Kind
from raypp.untrusted.documents import Bounds, parse_as
from raypp.untrusted.files import read_file
from raypp.untrusted.text import shell_word, visible

_SHOWN = 8
_BOUNDS = Bounds(size=4 << 20, values=100_000)
_Label = Annotated[str, MaxLen(200)]


class _File(TypedDict):
    measured: _Label
    device: _Label
    precision: _Label
    identity: dict[str, Any]
    costs: Costs


def cost_identity(job: Job, kind: Kind, precision: str) -> dict[str, Any]:
    """Returns what a job's measured costs depend on. That excludes the number of layers and the
    mesh. `kind`: of the device that is measured. `precision`: what `auto` is on it."""
    document = job_document(settle(job.with_precision(precision), Facts(kind)))
    without = ("num_layers", "from_hf", "original", "max_context")
    model = {key: value for key, value in document["model"].items() if key not in without}
    if model["lora"] is None:
        del model["lora"]
    train = {key: document["train"][key] for key in ("micro_batch_size", "precision", "activation_checkpointing")}
    train["compile"] = document["train"]["compile"]
    if not job.train.tf32:
        train["tf32"] = False
    return {"model": model, "seq_len": job.data.seq_len, "train": train}


def read_costs(path: Path, job: Job) -> Costs:
    """Reads costs that `raypp plan --measure` wrote. A precision of auto is that of the device that
    was measured. Raises JobError: the file cannot be read, or was measured for another model or for
    other microbatches."""
    fix = f"measure again: raypp plan JOB --measure {shell_word(path)}"
    document = parse_as(
        _File, read_file(path, _BOUNDS.size, JobError, fix=fix), str(path), _BOUNDS, JobError, fix, unknown="ignore"
    )
    costs, identity = document["costs"], document["identity"]
    precision = document["precision"]
    if precision not in PRECISIONS:
        raise JobError(f"{path}: precision {visible(precision)} is unknown", fix)
    wanted = cost_identity(job, costs.kind, precision)
    if identity != wanted:
        differs = sorted(_differences(identity, wanted))
        shown = visible(", ".join(differs[:_SHOWN])) + (" and others" if len(differs) > _SHOWN else "")
        raise JobError(f"{path} was measured for another job: {shown} differ", fix)
    source = f"costs measured {visible(document['measured'])} on {visible(document['device'])}"
    return replace(costs, measured=True, source=source)


def write_costs(path: Path, costs: Costs, job: Job, device: str, precision: str, measured: str) -> None:
    """Writes measured costs and what they are valid for. `precision`: that of the measured step.
    `measured`: when, for people."""
    numbers = {name: value for name, value in asdict(costs).items() if name not in ("measured", "source")}
    identity = cost_identity(job, costs.kind, precision)
    labels = {"measured": measured, "device": device, "precision": precision}
    document = {**labels, "identity": identity, "costs": numbers}
    path.write_text(json.dumps(document, indent=2) + "\n")


def _differences(measured: Any, wanted: Any, prefix: str = "") -> list[str]:
    if not isinstance(measured, dict) or not isinstance(wanted, dict):
        return [] if measured == wanted else [prefix]
    names = measured.keys() | wanted.keys()
    return [
        key
        for name in names
        for key in _differences(measured.get(name), wanted.get(name), f"{prefix}.{name}" if prefix else name)
    ]
