"""A model on a pipeline that answers what tasks ask: log-probabilities of rows, and new texts.

Rank 0 asks, the other ranks serve. Scores and texts are computed by the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from raypp.inference.evaluate import Tell, loaded
from raypp.inference.prompts import Encoded
from raypp.inference.scoring import Score, Scored, Scorer
from raypp.inference.source import Source
from raypp.memory.fetch import from_rank_zero
from raypp.pipeline.decode import Choice, Prompt
from raypp.records import Seat
from raypp.spec.job import Job
from raypp.train.assemble import AssembledRank
from raypp.train.sample import decoder_on
from raypp.train.step import StepRunner

T = TypeVar("T")
_ROWS = 8
"""Prompts that are decoded together."""


class TaskModel:
    """The model of a rank. All ranks construct it; then rank 0 asks, and the others `serve`.

    Args:
        rank: The assembled rank of a job from `task_job`.
        runner: Its step runner.
        ends: The ids that end a text.
        progress: Called on rank 0 with what is done of a request: `done`, `total`, `unit`.
    """

    def __init__(
        self,
        rank: AssembledRank,
        runner: StepRunner,
        ends: Sequence[int],
        progress: Callable[[Mapping[str, Any]], None] = lambda _report: None,
    ) -> None:
        self._scorer = Scorer(runner)
        self._decoder = decoder_on(rank)
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
        """Makes `serve` return. Only rank 0 calls it, once.

        Does nothing after a request that failed: the others wait within it, and their end is that
        of the process group.
        """
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
    """Loads a rank's part of a model; then rank 0 asks, and the others serve. Collective.

    Args:
        source: The model.
        job: From `task_job`.
        seat: This rank's seat.
        ends: The ids that end a text.
        ask: Called on rank 0 with its part of the model.
        tell: Called on rank 0 with the progress.

    Returns:
        On rank 0, what `ask` returned. On other ranks, None.
    """
    with loaded(source, job, seat) as (assembled, runner):
        model = TaskModel(assembled, runner, ends, lambda report: tell({"progress": report}))
        if seat.rank != 0:
            model.serve()
            return None
        try:
            return ask(model)
        finally:
            model.end()
