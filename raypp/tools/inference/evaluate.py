"""The loss of a trained model on text."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raypp.control.calls import Tell
from raypp.job.job import Job
from raypp.planning.decide import decide
from raypp.rank.assemble import AssembledRank, assemble
from raypp.rank.data.corpus import Corpus
from raypp.rank.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from raypp.rank.device_check import facts_here
from raypp.rank.step.evaluate import Evaluator
from raypp.rank.step.step import StepRunner
from raypp.records import Seat
from raypp.tools.inference.rank import HANG_S, load_weights
from raypp.tools.inference.source import Source

_MOST_DECODED = 4_000_000
"""Tokens of which the bytes of text are counted."""


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


@contextmanager
def loaded(source: Source, job: Job, seat: Seat) -> Iterator[tuple[AssembledRank, StepRunner]]:
    """Assembles a rank with the trained weights. Collective over the ranks of the job."""
    with assemble(decide(job, facts_here(seat)), seat, hang_timeout_s=HANG_S, draw=False) as assembled:
        load_weights(source, job, assembled.built.modules)
        yield assembled, StepRunner(assembled)


def loss_on_seat(source: Source, job: Job, seat: Seat, tell: Tell) -> dict[str, Any]:
    """Computes the loss of a model on the data of its job, on one rank. Collective over the ranks.
    `job`: from `data_job`. `tell`: on rank 0, called with the progress after each step of the
    evaluation. Returns `loss`: mean over the tokens with a label; `perplexity`: its exponential,
    None if that is no number; `tokens`: how many have a label; `seconds`; on rank 0
    `bytes_per_token`: of the text, without begin and end tokens, None if the data have no text.
    Raises DataError: the data cannot be used."""
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
