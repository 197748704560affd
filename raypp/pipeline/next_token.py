"""Chooses the next token of each row from its logits.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen.

    Attributes:
        temperature: Divides the logits. 0: the most likely token, without a draw.
        top_p: Only the most likely tokens that together reach this probability are drawn from.
        seed: The draw depends on it, the number of the prompt and the position; on nothing else.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def next_tokens(logits_BV: Tensor, prompts: Sequence[int], positions: Sequence[int], choice: Choice) -> list[int]:
    """Returns a token for each row of `logits_BV`, `[B, V]`.

    Args:
        logits_BV: The logits.
        prompts: The number of each row's prompt.
        positions: The position of the token in its row.
        choice: How to choose.
    """
    if choice.temperature == 0:
        chosen: list[int] = logits_BV.float().argmax(-1).tolist()
        return chosen
    rows: NDArray[np.float64] = logits_BV.to("cpu", torch.float64).numpy()
    return [
        drawn(row, choice, np.random.default_rng((choice.seed, prompt, position)).random())
        for row, prompt, position in zip(rows, prompts, positions, strict=True)
    ]


def drawn(logits_V: NDArray[np.float64], choice: Choice, uniform: float) -> int:
    """Returns the token that a number in [0, 1) draws from the logits `[V]`.

    The tokens in descending order of probability, up to `top_p`, share the interval.
    """
    scaled = logits_V / choice.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[order] / weights.sum())
    kept = int(np.searchsorted(sums, choice.top_p)) + 1
    sums = sums[:kept]
    return int(order[min(np.searchsorted(sums, uniform * sums[-1], side="right"), len(sums) - 1)])
