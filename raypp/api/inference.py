"""A trained model used: on this machine, or on a cluster."""

import json
import math
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from raypp.api import torch_process
from raypp.control import cluster_call
from raypp.control.client import collect_secrets, collect_settings, device_for
from raypp.control.cluster_call import Call
from raypp.control.clusters.find import Cluster
from raypp.control.package import INFERENCE_FILE
from raypp.errors import ResourcesError
from raypp.job.job import Job
from raypp.job.load import job_document
from raypp.job.secret import secrets_of, without_secrets
from raypp.job.small_files import FOLDER, contents
from raypp.rank.data.tokenizer import PromptTokenizer
from raypp.retry import Backoff
from raypp.tools.inference.prompts import Answer, Encoded, end_ids
from raypp.tools.inference.source import Source

_FREED_S = 15.0


def reports_of(
    cluster: Cluster | None,
    command: str,
    source: Source,
    job: Job,
    request: Mapping[str, Any],
    turns: Iterable[Mapping[str, Any]] = (),
) -> Generator[dict[str, Any]]:
    """Yields what rank 0 reports of a trained model, as it comes. The last is `{"answer": …}`. A
    caller that closes the iterator ends the ranks.

    Args:
        cluster: Where the ranks run; None: on this machine.
        command: `generate` or `eval`.
        source: The model; every rank reads its part of the weights itself.
        job: Its mesh and `resources` say how many ranks run on which devices.
        request: More of what `inference.on_seat.compute` takes.
        turns: Further requests, only on this machine; see `torch_process.reports_of`.

    Raises:
        UnreachableError: The cluster does not answer, or refuses the job.
        ResourcesError: There are fewer free devices than ranks.
        RayppError: A rank failed, or the ranks ended without an answer.
    """
    document = without_secrets(job_document(job))
    request = {"source": asdict(source), "job": document, **request}
    if cluster is None:
        return torch_process.reports_of("raypp.tools.inference.on_seat", request, f"raypp {command}", turns)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    request |= {"name": f"{command}-{source.run or 'model'}-{stamp}", "device": _device(cluster, job)}
    small = contents(source.document or {}, {"data": {"tokenizer": source.tokenizer}}, document)
    call = Call(
        f"{command} {source.place}",
        "raypp.tools.inference.driver",
        secrets=collect_secrets(here=cluster.embedded is not None) | secrets_of(job),
        settings=collect_settings(cluster),
        files=[
            (INFERENCE_FILE, json.dumps(request).encode()),
            *((f"{FOLDER}/{one}", data) for one, data in small.items()),
        ],
        timeout_s=math.inf,
        always_job=True,
    )
    return cluster_call.reports_of(cluster, call)


def turn_of(prompts: Sequence[Encoded], choice: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what asks for the texts of prompts. `choice`: `temperature`, `top_p` and `seed`."""
    return {"prompts": [[prompt.tokens, prompt.limit] for prompt in prompts], "choice": choice}


def complete(
    source: Source,
    pp: int,
    tokenizer: PromptTokenizer,
    answers: Sequence[Answer],
    rows: int,
    cluster: Cluster | None = None,
    on_token: Callable[[], None] = lambda: None,
    **choice: Any,
) -> None:
    """Generates the texts of all answers.

    Args:
        answers: One per prompt; they take the new tokens.
        rows: Prompts that are decoded together.
        cluster: Where the ranks run; None: on this machine.
        on_token: Called after each new token.
        choice: `temperature`, `top_p` and `seed`.

    Raises:
        RayppError: As `reports_of`.
    """
    request = turn_of([answer.prompt for answer in answers], choice)
    request |= {"ends": list(end_ids(source, tokenizer)), "rows": rows}
    with closing(reports_of(cluster, "generate", source, source.job(pp), request)) as reports:
        for report in reports:
            if "token" in report:
                prompt, token, finish = report["token"]
                answers[prompt].add(token, finish)
                on_token()


def row(answer: Answer, tokenizer: PromptTokenizer) -> dict[str, Any]:
    """Returns an answer as `raypp generate --json` prints it."""
    text = answer.text(tokenizer)
    return {"prompt": answer.prompt.text, "text": text, "tokens": answer.tokens, "finish": answer.finish}


def _device(cluster: Cluster, job: Job) -> str:
    """Returns the device of the ranks, when enough are free. For some seconds, the dashboard still
    counts the devices of a job that has ended as used."""

    def look(*, idle: bool = False) -> str:
        nodes = cluster.dashboard.nodes()
        if idle:
            nodes = [replace(node, free_cpus=node.cpus, free_gpus=node.gpus) for node in nodes]
        return device_for(job, nodes, embedded=cluster.embedded is not None, training=False)

    def fits_when_idle(error: Exception) -> bool:
        try:
            return isinstance(error, ResourcesError) and bool(look(idle=True))
        except ResourcesError:
            return False

    try:
        return Backoff(_FREED_S, 1.0, 1.0).call(look, fits_when_idle)
    except ResourcesError as error:
        raise ResourcesError(
            replace(problem, key="--mesh", fix=problem.fix.replace("--set mesh.pp=", "--mesh pp="))
            for problem in error.problems
        ) from None
