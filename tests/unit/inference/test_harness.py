"""The model as lm-evaluation-harness sees it."""

from collections.abc import Sequence
from typing import Any

import pytest

from raypp.errors import JobError
from raypp.tools.inference.source import Source
from raypp.tools.inference.task_model import Score, Scored

pytest.importorskip("lm_eval")

CONTEXT = 8


class Rows:
    def __init__(self) -> None:
        self.rows: list[Scored] = []

    def score(self, rows: Sequence[Scored]) -> list[Score]:
        self.rows += rows
        return [Score(0.0, True) for _ in rows]


def test_a_context_is_cut_and_a_continuation_that_does_not_fit_is_named() -> None:
    from lm_eval.api.instance import Instance

    from raypp.tools.inference.harness import PipelineLM

    model: Any = Rows()
    harness = PipelineLM(Source("here", {"vocab_size": 257}, CONTEXT, "fp32", "bytes", run="mine"), model)

    def score(*pairs: tuple[str, str]) -> None:
        harness.loglikelihood([Instance("loglikelihood", {}, pair, 0, ("mine", 0, 1)) for pair in pairs])

    score(("abc" * 9, "x" * 3), ("abc", "x" * CONTEXT))
    assert [(bytes(row.tokens), row.scored) for row in model.rows] == [(b"abcabcxxx", 3), (b"c" + b"x" * CONTEXT, 8)]
    said = "--tasks: mine has a continuation of 9 tokens, but the model's context has 8"
    with pytest.raises(JobError, match=said):
        score(("a", "x"), ("abc", "x" * (CONTEXT + 1)))
