"""A model on a pipeline that answers what tasks ask: log-probabilities of rows, and new texts.

Rank 0 asks, the other ranks serve. Scores and texts are computed by the same stages. Scores come
from a forward-only program on the pipeline, in which every row is a document of its own.

Legend: B rows of a microbatch, T tokens, V vocabulary, R rows of a request.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from raypp.control.calls import Tell
from raypp.job.job import Job
from raypp.rank.assemble import AssembledRank
from raypp.rank.data.packing import NO_LABEL, Row
from raypp.rank.step.evaluate import ForwardRunner
from raypp.rank.step.sample import decoder_on
from raypp.rank.step.step import StepRunner
from raypp.records import Seat
from raypp.stages.models.loss import IGNORED
from raypp.stages.models.stage import return_logits
from raypp.stages.pipeline.decode import Choice, Prompt, Repeats
from raypp.state.hf.original import repeat_settings
from raypp.state.memory.fetch import from_rank_zero
from raypp.tools.inference.evaluate import loaded
from raypp.tools.inference.prompts import Encoded
from raypp.tools.inference.source import Source

T = TypeVar("T")
_ROWS = 8
"""Prompts that are decoded together."""


class Scored(NamedTuple):
    """A row to be scored. `tokens`: its ids. `scored`: how many of the last, at least 1."""

    tokens: Sequence[int]
    scored: int


class Score(NamedTuple):
    """A row's score. `logprob`: sum over the scored ids. `greedy`: each is the most probable."""

    logprob: float
    greedy: bool


def row_scores(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Returns each row's summed log-probability, and how many labels are not the most probable id.
    `labels_BT`: `[B, T]`, int64; `IGNORED` where a token has no label. Returns float64 `[B, 2]`."""
    scores = logits_BTV.new_zeros((len(labels_BT), 2), dtype=torch.float64)
    for index, labels_T in enumerate(labels_BT):
        labelled_T = labels_T != IGNORED
        logits_tV, labels_t = logits_BTV[index][labelled_T].float(), labels_T[labelled_T]
        scores[index, 0] = -F.cross_entropy(logits_tV, labels_t, reduction="none").double().sum()
        scores[index, 1] = (logits_tV.argmax(-1) != labels_t).sum()
    return scores


class Scorer:
    """Scores rows on the stages of a rank, which then return logits instead of losses."""

    def __init__(self, runner: StepRunner) -> None:
        for stage in runner.built.runtime.planned.values():
            return_logits(stage.submod)
        self._rows, self._microbatches = runner.job.train.micro_batch_size, runner.pipeline.microbatches
        self._forwards = ForwardRunner(runner, row_scores)

    def scores(self, rows: Sequence[Scored], progress: Callable[[int], None] = lambda done: None) -> list[Score]:
        """Scores rows. Collective over the pipeline: all ranks give the same rows."""
        # Rows of similar length share a microbatch, which is as long as its longest row.
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index].tokens))
        found_R2 = torch.zeros((len(rows), 2), dtype=torch.float64)
        each = self._microbatches * self._rows
        for start in range(0, len(rows), each):
            chosen = order[start : start + each]
            scores = self._step([_row(rows[index]) for index in chosen])
            if scores is not None:
                found_R2[torch.tensor(chosen)] = scores[: len(chosen)]
            progress(start + len(chosen))
        dist.all_reduce(found_R2)  # ranks without the last stage add zeros
        return [Score(logprob, wrong == 0) for logprob, wrong in found_R2.tolist()]

    def _step(self, rows: list[Row]) -> Tensor | None:
        """Returns the scores `[microbatches · B, 2]` on the rank of the last stage."""
        each = self._rows
        filler = Row(np.array([0]), np.array([NO_LABEL]), (1,))
        rows = rows + [filler] * (self._microbatches * each - len(rows))
        _, scores = self._forwards.run([tuple(rows[start : start + each]) for start in range(0, len(rows), each)])
        return torch.cat(scores).cpu() if scores else None


def _row(row: Scored) -> Row:
    """Returns a row whose last tokens predict the scored ids."""
    tokens = np.asarray(row.tokens, dtype=np.int64)
    labels = np.full(len(tokens) - 1, NO_LABEL, dtype=np.int64)
    labels[-row.scored :] = tokens[-row.scored :]
    return Row(tokens[:-1], labels, (len(tokens) - 1,))


class TaskModel:
    """The model of a rank. All ranks construct it; then rank 0 asks, and the others `serve`.
    `rank`: the assembled rank of a job from `task_job`. `runner`: its step runner."""

    def __init__(
        self,
        rank: AssembledRank,
        runner: StepRunner,
        ends: Sequence[int],
        progress: Callable[[Mapping[str, Any]], None] = lambda _report: None,
    ) -> None:
        self._scorer = Scorer(runner)
        self._decoder = replace(decoder_on(rank), repeats=Repeats(*repeat_settings(rank.job.model)))
        self._ends, self._progress, self._within = list(ends), progress, False

    def score(self, rows: Sequence[Scored]) -> list[Score]:
        """Scores rows. Only rank 0 calls it."""
        with self._asking({"score": [[list(map(int, row.tokens)), row.scored] for row in rows]}):
            return self._scorer.scores(rows, lambda done: self._tell(done, len(rows)))

    def generate(self, prompts: Sequence[Encoded], choice: Choice) -> list[tuple[list[int], str]]:
        """Returns the new tokens of each prompt, and why its text ended. Only rank 0 calls it."""
        asked = [Prompt(tuple(prompt.tokens), prompt.limit) for prompt in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        finishes = [""] * len(prompts)

        def emit(prompt: int, token: int, finish: str | None) -> None:
            tokens[prompt].append(token)
            if finish is not None:
                finishes[prompt] = finish
                self._tell(sum(map(bool, finishes)), len(prompts))

        texts = [[prompt.tokens, prompt.limit] for prompt in asked]
        with self._asking({"generate": texts, "choice": asdict(choice)}):
            self._decoder.run(asked, choice, self._ends, emit, rows=_ROWS)
        return list(zip(tokens, finishes, strict=True))

    def end(self) -> None:
        """Makes `serve` return. Only rank 0 calls it, once. Does nothing after a request that
        failed: the others wait within it, and their end is that of the process group."""
        if not self._within:
            from_rank_zero(None)

    def serve(self) -> None:
        """Computes what rank 0 asks for, until it calls `end`."""
        while (asked := from_rank_zero(None)) is not None:
            if "score" in asked:
                self._scorer.scores([Scored(tokens, scored) for tokens, scored in asked["score"]])
                continue
            prompts = [Prompt(tuple(tokens), limit) for tokens, limit in asked["generate"]]
            self._decoder.run(prompts, Choice(**asked["choice"]), self._ends, lambda *_: None, rows=_ROWS)

    @contextmanager
    def _asking(self, request: Mapping[str, Any]) -> Iterator[None]:
        """Sends a request to the others, for what rank 0 then computes with them."""
        self._within = True
        from_rank_zero(request)
        yield
        self._within = False

    def _tell(self, done: int, total: int) -> None:
        self._progress({"done": done, "total": total, "unit": "rows"})


def ask_on_seat(
    source: Source, job: Job, seat: Seat, ends: Sequence[int], ask: Callable[[TaskModel], T], tell: Tell
) -> T | None:
    """Loads a rank's part of a model; then rank 0 asks, and the others serve. Collective. Returns
    on rank 0, what `ask` returned. On other ranks, None."""
    with loaded(source, job, seat) as (assembled, runner):
        model = TaskModel(assembled, runner, ends, lambda report: tell({"progress": report}))
        if seat.rank != 0:
            model.serve()
            return None
        try:
            return ask(model)
        finally:
            model.end()
