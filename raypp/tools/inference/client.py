"""Uses a trained model on a cluster: submits a Ray job, and reads what it prints."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from raypp.control.client import collect_secrets, collect_settings, device_for
from raypp.control.cluster_call import Call, lines_of
from raypp.control.clusters.dashboard import NodeResources
from raypp.control.clusters.find import Cluster
from raypp.control.package import INFERENCE_FILE, REPORT
from raypp.errors import ResourcesError
from raypp.job.job import Job
from raypp.job.load import job_document
from raypp.job.secret import secrets_of, without_secrets
from raypp.job.small_files import FOLDER, contents
from raypp.tools.inference.processes import first_error
from raypp.tools.inference.source import Source

_FREED_S = 15.0


def use_on_cluster(
    cluster: Cluster, command: str, source: Source, job: Job, request: Mapping[str, Any]
) -> Generator[dict[str, Any]]:
    """Yields what rank 0 reports, as it comes. The answer is the last.

    A caller that closes the iterator ends the job on the cluster.

    Args:
        command: `generate` or `eval`, for names.
        source: The model; every rank reads its part of the weights itself.
        job: Its mesh and `resources` say how many ranks run on which devices.
        request: More of what `inference.on_seat.use_model` takes.

    Raises:
        UnreachableError: The cluster does not answer, or refuses the job.
        ResourcesError: There are fewer free devices than ranks.
        RayppError: A rank failed; with its exit code.
    """
    device = _device(cluster, job)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    name = f"{command}-{source.run or 'model'}-{stamp}"
    whole = {
        "name": name,
        "device": device,
        "source": asdict(source),
        "job": without_secrets(job_document(job)),
        **request,
    }
    small = contents(source.document or {}, {"data": {"tokenizer": source.tokenizer}}, job_document(job))
    call = Call(
        f"{command} {source.place}",
        "raypp.tools.inference.driver",
        secrets=collect_secrets(here=cluster.embedded is not None) | secrets_of(job),
        settings=collect_settings(cluster),
        files=[
            (INFERENCE_FILE, json.dumps(whole).encode()),
            *((f"{FOLDER}/{one}", data) for one, data in small.items()),
        ],
        timeout_s=math.inf,
        always_job=True,
    )
    with closing(lines_of(cluster, call)) as lines:
        for line in lines:
            if line.startswith(REPORT):
                report = json.loads(line.removeprefix(REPORT))
                if "error" in report:
                    raise first_error({0: report["error"]})
                yield report


def _device(cluster: Cluster, job: Job) -> str:
    """Returns the device of the ranks, when enough are free. For some seconds, the dashboard still
    counts the devices of a job that has ended as used."""
    end = time.monotonic() + _FREED_S
    while True:
        nodes = cluster.dashboard.nodes()
        try:
            return device_for(job, nodes, embedded=cluster.embedded is not None, training=False)
        except ResourcesError as error:
            if time.monotonic() > end or not _fits_when_idle(job, nodes):
                raise ResourcesError(
                    replace(problem, key="--mesh", fix=problem.fix.replace("--set mesh.pp=", "--mesh pp="))
                    for problem in error.problems
                ) from None
        time.sleep(1.0)


def _fits_when_idle(job: Job, nodes: Sequence[NodeResources]) -> bool:
    idle = [replace(node, free_cpus=node.cpus, free_gpus=node.gpus) for node in nodes]
    try:
        device_for(job, idle, training=False)
    except ResourcesError:
        return False
    return True
