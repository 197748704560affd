"""`raypp.plan`: what a job will do and cost, without a cluster."""

from __future__ import annotations

from pathlib import Path

from raypp.api.checked_job import checked
from raypp.api.torch_process import ask
from raypp.errors import JobError, RunFailedError
from raypp.planning.costs import device_named, read_costs
from raypp.planning.machines import read_machines
from raypp.planning.plan import Plan, make_plan
from raypp.planning.predict import Grounds
from raypp.planning.sizes import count, not_counted, sizes_remark
from raypp.spec.job import Job
from raypp.spec.load import job_document, job_file


def plan(
    job: Job,
    *,
    device: str | None = None,
    link_gbps: float | None = None,
    links: str | Path | None = None,
    per_node: int | None = None,
    costs: str | Path | None = None,
) -> Plan:
    """Plans a job.

    Args:
        job: The job.
        device: Kind of device, such as rtx4090; None: what the job says.
        link_gbps: Rate between any two nodes, in Gbit/s.
        links: A file of nodes and links, from `raypp doctor --out`.
        per_node: Devices per node.
        costs: A file of measured costs, from `raypp plan --measure`.

    Raises:
        JobError: All problems of the job; or the device is unknown, or a file cannot be used.
    """
    job = checked(job_file(job)).job
    count_own_model(job)
    grounds = grounds_of(job, device=device, link_gbps=link_gbps, links=links, per_node=per_node, costs=costs)
    return make_plan(job, link_gbps=link_gbps, grounds=grounds)


def grounds_of(
    job: Job,
    *,
    device: str | None,
    link_gbps: float | None,
    links: str | Path | None,
    per_node: int | None,
    costs: str | Path | None,
) -> Grounds:
    """Collects what `plan` is told about machines and costs.

    Raises:
        JobError: A file cannot be used, the device is unknown, or links are given twice.
    """
    if links is not None and (link_gbps is not None or per_node is not None):
        raise JobError("--links already describes nodes and links", "leave out --link-gbps and --per-node")
    return Grounds(
        machines=read_machines(Path(links)) if links is not None else None,
        costs=read_costs(Path(costs), job) if costs is not None else None,
        device=device_named(device).name if device is not None else None,
        link_gbps=link_gbps,
        per_node=per_node,
    )


def count_own_model(job: Job) -> None:
    """Counts the model of a user's own factory in a process that may import torch.

    Notes the reason if it fails.
    """
    if sizes_remark(job.model) is None:
        return
    try:
        count(job.model, ask("raypp.measure.built_sizes", {"job": job_document(job)}, "building the model"))
    except RunFailedError as error:
        not_counted(job.model, "; ".join(problem.what for problem in error.problems))
