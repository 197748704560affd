"""Log-probabilities of the last tokens of rows, by a forward-only program on a pipeline.

Every row is a document of its own.

Legend: B rows of a microbatch, T tokens, V vocabulary, R rows of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from raypp.data.packing import NO_LABEL, Row
from raypp.models.loss import IGNORED
from raypp.models.stage import return_logits
from raypp.train.evaluate import ForwardRunner
from raypp.train.step import StepRunner


class Scored(NamedTuple):
    """A row to be scored.

    Attributes:
        tokens: Its ids; more than `scored`.
        scored: How many of the last ids are scored, at least 1.
    """

    tokens: Sequence[int]
    scored: int


class Score(NamedTuple):
    """The score of a row.

    Attributes:
        logprob: Summed log-probability of the scored ids.
        greedy: Whether each of them is the most probable one.
    """

    logprob: float
    greedy: bool


def row_scores(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Returns each row's summed log-probability, and how many labels are not the most probable id.

    Args:
        logits_BTV: `[B, T, V]`.
        labels_BT: `[B, T]`, int64; `IGNORED` where a token has no label.

    Returns:
        float64 `[B, 2]`.
    """
    scores = logits_BTV.new_zeros((len(labels_BT), 2), dtype=torch.float64)
    for index, labels_T in enumerate(labels_BT):
        labelled_T = labels_T != IGNORED
        logits_tV, labels_t = logits_BTV[index][labelled_T].float(), labels_T[labelled_T]
        scores[index, 0] = -F.cross_entropy(logits_tV, labels_t, reduction="none").double().sum()
        scores[index, 1] = (logits_tV.argmax(-1) != labels_t).sum()
    return scores


class Scorer:
    """Scores rows on the stages of a rank, which then return logits instead of losses.

    Args:
        runner: The step runner of a job with one replica.
    """

    def __init__(self, runner: StepRunner) -> None:
        for stage in runner.built.runtime.planned.values():
            return_logits(stage.submod)
        self._rows, self._microbatches = runner.job.train.micro_batch_size, runner.pipeline.microbatches
        self._forwards = ForwardRunner(runner, row_scores)

    def scores(self, rows: Sequence[Scored], progress: Callable[[int], None] = lambda done: None) -> list[Score]:
        """Scores rows. Collective over the pipeline: all ranks give the same rows.

        Args:
            rows: The rows.
            progress: Called with the number of rows that are done, after each step.
        """
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
