"""Decodes prompts on the stages of a pipeline, several groups of rows in flight.

All ranks take turns over the groups, and in a turn over the stages. The last stage's rank chooses
tokens and sends them to all, so all know when a group is done. The batch size alone decides which
prompts share a product, never the mesh: products of other shapes round otherwise. With tp, the
ranks of each tp coordinate are a pipeline, and their last ones choose by the same logits.

Legend: B rows of a group, T tokens of a row, C hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from raypp.errors import Problem, RunFailedError
from raypp.job.models import DecoderOptions
from raypp.stages.models.attention import AttentionKernel
from raypp.stages.models.kv_cache import KeyValueCache
from raypp.stages.models.tensor_ranks import tokens_whole

LENGTH, END = "length", "eos"
"""Why a text ends: it has as many new tokens as allowed, or the model ended it."""

Emit = Callable[[int, int, str | None], None]
"""Takes the number of a prompt, its next token, and why the text ends with it (None: it goes on).
The token that ends a text is an end token only with `END`."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. `tokens`: token ids, at least one. `limit`: the most new tokens, at least 1."""

    tokens: tuple[int, ...]
    limit: int


@dataclass(eq=False)
class Group:
    """Prompts that are decoded together, row by row.

    Attributes:
        rows: The tokens of each row so far.
        chosen: The tokens of this turn; only on the rank that has chosen them.
        turns: Turns that are over.
        waiting: A turn has begun whose tokens have not been taken.
        ended: The rows whose texts have ended.
    """

    first: int
    prompts: Sequence[Prompt]
    rows: list[list[int]] = field(init=False)
    caches: dict[int, KeyValueCache] = field(default_factory=dict)
    chosen: list[int] = field(default_factory=list)
    turns: int = 0
    waiting: bool = False
    ended: set[int] = field(default_factory=set)
    sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [list(prompt.tokens) for prompt in self.prompts]

    @property
    def limit(self) -> int:
        return max(prompt.limit for prompt in self.prompts)

    def over(self, stop_early: bool) -> bool:
        """Whether it takes no further turn."""
        return self.turns >= self.limit or (stop_early and len(self.ended) == len(self.rows))


def length_that_changes_keys(options: DecoderOptions) -> int | None:
    """Returns the length beyond which a row's keys have other frequencies; None: there is none."""
    return options.rope.original_context if options.rope is not None and options.rope.kind == "longrope" else None


@dataclass(frozen=True)
class Repeats:
    """What a model's generation_config.json says about tokens that a row has already. `penalty`:
    divides their logits that are positive, and multiplies the others. `ngram`: no sequence of so
    many tokens comes twice; 0: any may."""

    penalty: float = 1.0
    ngram: int = 0

    def applied(self, logits_BV: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """Returns the logits `[B, V]` of the rows' next tokens, as transformers changes them."""
        if self == Repeats():
            return logits_BV
        logits_BV = logits_BV.float().clone()
        for logits_V, row in zip(logits_BV, map(list, rows), strict=True):
            groups = sorted(set(row))
            had = logits_V[groups]
            logits_V[groups] = torch.where(had < 0, had * self.penalty, had / self.penalty)
            begun = row[len(row) - self.ngram + 1 :]
            starts = range(len(row) - self.ngram + 1 if self.ngram else 0)
            logits_V[[row[at + self.ngram - 1] for at in starts if row[at : at + self.ngram - 1] == begun]] = -torch.inf
        return logits_BV


@dataclass(frozen=True)
class PipelineDecoder:
    """Decodes on the stages of this rank. All ranks of the pipeline run the same prompts.

    Attributes:
        stages: This rank's stages by index, ascending. None of them trains.
        group: The ranks of the pipeline, for activations; None with one rank.
        world: The global rank of each pipeline rank, for tokens.
        kernel: Attention within prompts; None: the plain one.
        border: See `length_that_changes_keys`. A group is computed again when a row passes it.
        repeats: How tokens that a row has are made less likely.
    """

    stages: Mapping[int, nn.Module]
    rank_of_stage: Sequence[int]
    rank: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup | None = None
    world: Sequence[int] = (0,)
    kernel: AttentionKernel | None = None
    border: int | None = None
    repeats: Repeats = Repeats()

    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[Prompt],
        choice: Choice,
        ends: Sequence[int],
        emit: Emit,
        *,
        rows: int,
        stop_early: bool = True,
    ) -> None:
        """Decodes all prompts.

        Args:
            emit: Called on every rank with each new token, in the same order.
            rows: Prompts of a group. Which prompts are computed together does not depend on the
                number of ranks.
            stop_early: A group ends when all its texts have ended. False: each group takes as many
                turns as its limit, so that no rank's order of messages depends on a token.

        Raises:
            RunFailedError: Logits are not finite; only with `stop_early`.
        """
        groups = deque(Group(first, prompts[first : first + rows]) for first in range(0, len(prompts), rows))
        slots: list[Group | None] = [None] * len(self.world)
        busy = True
        with tokens_whole(self.stages.values()):
            while busy:
                busy = False
                for index, group in enumerate(slots):
                    if group is not None and group.waiting:
                        self._take(group, ends, emit)
                    if group is None or group.over(stop_early):
                        if group is not None:
                            _arrived(group)
                        group = slots[index] = groups.popleft() if groups else None
                    if group is not None:
                        self._turn(group, choice, check=stop_early)
                        busy = True

    @property
    def _last(self) -> int:
        return self.rank_of_stage[-1]

    def _turn(self, group: Group, choice: Choice, *, check: bool) -> None:
        """Computes the next token of each row, as far as this rank's stages go."""
        lengths = [len(row) for row in group.rows]
        whole = group.turns == 0 or (self.border is not None and self.border + 1 in lengths)
        longest = max(lengths) if whole else 1
        places = [[*range(longest)]] * len(lengths) if whole else [[length - 1] for length in lengths]
        positions_BT = torch.tensor(places, device=self.device)
        x = torch.empty(0)
        for index, stage in self.stages.items():
            if index == 0:
                tokens = [[*row, *[0] * (longest - len(row))] if whole else row[-1:] for row in group.rows]
                x = torch.tensor(tokens, device=self.device)
            elif self.rank_of_stage[index - 1] != self.rank:
                x = self._received(index, len(lengths), longest)
            _arrived(group)
            if whole:
                room = max(len(prompt.tokens) for prompt in group.prompts) + group.limit
                group.caches[index] = KeyValueCache(room)
                documents = group.caches[index].prompts(lengths, self.device, self.kernel)
            else:
                documents = group.caches[index].next_token([length - 1 for length in lengths], self.device)
            if index < len(self.rank_of_stage) - 1:
                x = stage(x, positions_BT, documents)
                self._pass_on(x, self.rank_of_stage[index + 1], group)
                continue
            last_B = torch.tensor([length - 1 for length in lengths] if whole else [0] * len(lengths))
            logits_BV = stage(x, positions_BT, documents, last_B=last_B.to(self.device))[:, 0]
            if check and not bool(torch.isfinite(logits_BV).all()):
                raise RunFailedError(
                    Problem("", "the model's logits are not finite", "use an older checkpoint (--step)")
                )
            logits_BV = self.repeats.applied(logits_BV, group.rows)
            numbers = range(group.first, group.first + len(lengths))
            self._choose(group, next_tokens(logits_BV, numbers, lengths, choice))
        group.waiting = True

    def _received(self, index: int, rows: int, tokens: int) -> Tensor:
        """Receives the input `[B, T, C]` of a stage."""
        x = torch.empty(rows, tokens, self.hidden_size, dtype=self.dtype, device=self.device)
        dist.recv(x, group=self.group, group_src=self.rank_of_stage[index - 1])
        return x

    def _pass_on(self, x_BTC: Tensor, rank: int, group: Group) -> None:
        """Sends the output `[B, T, C]` of a stage to the rank of the next one."""
        if rank != self.rank:
            work = dist.isend(x_BTC, group=self.group, group_dst=rank)
            assert work is not None
            group.sent.append((work, x_BTC))

    def _choose(self, group: Group, tokens: list[int]) -> None:
        """Keeps the tokens that this rank has chosen, and sends them to the others."""
        group.chosen = tokens
        message = torch.tensor(tokens)
        for rank, there in enumerate(self.world):
            if rank != self.rank:
                work = dist.isend(message, there)
                assert work is not None
                group.sent.append((work, message))

    def _take(self, group: Group, ends: Sequence[int], emit: Emit) -> None:
        """Ends a turn: takes its tokens, and finds which texts end."""
        group.waiting = False
        if self.rank != self._last:
            message = torch.empty(len(group.rows), dtype=torch.int64)
            dist.recv(message, self.world[self._last])
            group.chosen = message.tolist()
        group.turns += 1
        for index, (row, prompt, token) in enumerate(zip(group.rows, group.prompts, group.chosen, strict=True)):
            row.append(token)
            if index not in group.ended:
                finish = END if token in ends else LENGTH if group.turns >= prompt.limit else None
                emit(group.first + index, token, finish)
                if finish is not None:
                    group.ended.add(index)


def _arrived(group: Group) -> None:
    """Waits for the messages of a group's last turn, all of which have been received by now."""
    for work, _ in group.sent:
        work.wait()
    group.sent.clear()


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
    """Returns a token for each row of `logits_BV`, `[B, V]`."""
    if choice.temperature == 0:
        chosen: list[int] = logits_BV.float().argmax(-1).tolist()
        return chosen
    rows: NDArray[np.float64] = logits_BV.to("cpu", torch.float64).numpy()
    return [
        drawn(row, choice, np.random.default_rng((choice.seed, prompt, position)).random())
        for row, prompt, position in zip(rows, prompts, positions, strict=True)
    ]


def drawn(logits_V: NDArray[np.float64], choice: Choice, uniform: float) -> int:
    """Returns the token that a number in [0, 1) draws from the logits `[V]`. The tokens in
    descending order of probability, up to `top_p`, share the interval."""
    scaled = logits_V / choice.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[order] / weights.sum())
    kept = int(np.searchsorted(sums, choice.top_p)) + 1
    sums = sums[:kept]
    return int(order[min(np.searchsorted(sums, uniform * sums[-1], side="right"), len(sums) - 1)])
