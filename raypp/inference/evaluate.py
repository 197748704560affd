"""Evaluates a trained model: its loss on text, or tasks of lm-evaluation-harness.

It prints lines `{"progress": {"done", "total", "unit"}}` on the way. Ranks are processes of this
machine: one for each stage of the pipeline.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from raypp.data.corpus import Corpus
from raypp.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from raypp.errors import JobError, Problem
from raypp.inference.eval_job import DATA
from raypp.inference.rank import load_weights
from raypp.inference.source import Source
from raypp.measure.local_ranks import run_ranks
from raypp.planning.decide import decide
from raypp.ports import free_port
from raypp.records import Seat
from raypp.spec.job import Job
from raypp.spec.load import job_document, parse_job
from raypp.train.assemble import AssembledRank, assemble
from raypp.train.cuda_settings import prepare_driver
from raypp.train.device_check import facts_here
from raypp.train.evaluate import Evaluator
from raypp.train.own_seat import local_seat
from raypp.train.step import StepRunner

_HANG_S = 86_400.0
"""Ranks wait for each other this long: rank 0 may read large data, or generate."""
Tell = Callable[[Mapping[str, Any]], None]
"""Takes what a rank reports while it computes: one JSON object."""
_MOST_DECODED = 4_000_000
"""Tokens of which the bytes of text are counted."""


def evaluate(source: Source, job: Job) -> dict[str, Any]:
    """Computes the loss of a model on the data of a job from `data_job`.

    Returns:
        `loss`: mean over the tokens with a label; `perplexity`: its exponential, None if that is no
        number; `tokens`: how many have a label; `bytes_per_token`: of the text, without begin and
        end tokens, None if the data have no text; `seconds`.

    Raises:
        DataError: The data cannot be used.
        JobError: No token of the data has a label.
        RunFailedError: A rank failed.
    """
    return checked(on_ranks(_loss_on_rank, source, job))


def checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns what `loss_on_seat` found on rank 0.

    Raises:
        JobError: No token of the data has a label.
    """
    if not answer["tokens"]:
        fault = "has no token that follows another one: there is nothing to predict"
        raise JobError(Problem(DATA, fault, "give longer documents"))
    return answer


def bytes_per_token(corpus: Corpus, tokenizer: Tokenizer) -> float | None:
    """Returns the bytes of text of a token, over the first documents; None if there is no text."""
    if not isinstance(tokenizer, ByteTokenizer | FileTokenizer):
        return None
    tokens, size = 0, 0
    for index in range(len(corpus)):
        ids = corpus.ids(index)
        ids = ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_id else ids
        begun = tuple(ids[: len(tokenizer.before)].tolist()) == tokenizer.before
        ids = ids[len(tokenizer.before) :] if begun else ids
        size += len(ids) if isinstance(tokenizer, ByteTokenizer) else len(tokenizer.decode(ids.tolist()).encode())
        tokens += len(ids)
        if tokens > _MOST_DECODED:
            break
    return size / tokens if tokens else None


def on_ranks(function: Any, source: Source, job: Job, *arguments: Any) -> Any:
    """Runs `function(rank, port, source document, job document, device, *arguments)` on all ranks.

    One rank runs in this process.

    Returns:
        What rank 0's function returned.
    """
    world = job.mesh.world
    prepare_driver()
    device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world else "cpu"
    given = (asdict(source), job_document(job), device, *arguments)
    return function(0, free_port(), *given) if world == 1 else run_ranks(world, function, *given, patience_s=None)


@contextmanager
def loaded(source: Source, job: Job, seat: Seat) -> Iterator[tuple[AssembledRank, StepRunner]]:
    """Assembles a rank with the trained weights. Collective over the ranks of the job."""
    with assemble(decide(job, facts_here(seat)), seat, hang_timeout_s=_HANG_S, draw=False) as assembled:
        load_weights(source, job, assembled.built.modules)
        yield assembled, StepRunner(assembled)


def _loss_on_rank(
    rank: int, port: int, source: Mapping[str, Any], document: Mapping[str, Any], device: str
) -> dict[str, Any]:
    job = parse_job(document)
    return loss_on_seat(Source(**source), job, local_seat(rank, job.mesh.world, port, job, device=device), print_report)


def loss_on_seat(source: Source, job: Job, seat: Seat, tell: Tell) -> dict[str, Any]:
    """Computes what `evaluate` returns, on one rank. Collective over the ranks of the job.

    Args:
        source: The model.
        job: From `data_job`.
        seat: This rank's seat.
        tell: On rank 0, called with the progress after each step of the evaluation.

    Returns:
        On rank 0, the answer. On other ranks, without `bytes_per_token`.
    """
    with loaded(source, job, seat) as (_, runner):
        held_out = job.data.eval is not None
        total = runner.loader.tokens_once(held_out=held_out)

        def progress(tokens: int) -> None:
            tell({"progress": {"done": min(tokens, total), "total": total, "unit": "tokens"}})

        steps = None if held_out else runner.loader.once()
        result = Evaluator(runner).run(steps, *[progress] if seat.rank == 0 else [])
        documents = runner.loader.documents
    perplexity = math.exp(result.loss) if result.loss < math.log(sys.float_info.max) else None
    answer = {"loss": result.loss, "perplexity": perplexity, "tokens": result.tokens, "seconds": result.seconds}
    if seat.rank == 0:
        corpus = documents.train if documents.held_out is None else documents.held_out
        answer["bytes_per_token"] = bytes_per_token(corpus, documents.tokenizer)
    return answer


def print_report(report: Mapping[str, Any]) -> None:
    """Prints a report for the process that reads this one's standard output."""
    print(json.dumps(report), flush=True)  # noqa: T201


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answers `{"source", "job"}` by the loss, and with `tasks` and `limit` by their results."""
    source, job = Source(**request["source"]), parse_job(request["job"])
    if request.get("tasks"):
        from raypp.inference.harness import run_tasks

        return run_tasks(source, job, request["tasks"], request.get("limit"))
    return evaluate(source, job)
