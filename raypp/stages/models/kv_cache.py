"""Keys and values of the tokens so far, so that decoding computes only the newest token.

Rows of different lengths begin at position 0 and are padded at their end. A layer with a window
keeps only as many tokens as its window has: position p is in slot p mod R of each row.

Legend: B rows, T tokens of a row in this forward, S = B · T, H query heads, K key/value heads (K
divides H), G = H / K, D head width, N positions that are looked at, R slots of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from raypp.job.layer_rules import AttentionRule
from raypp.stages.models.attention import PLAIN, AttentionKernel
from raypp.stages.models.documents import Move, PackedDocuments


@dataclass(eq=False)
class KeyValueCache:
    """The cache of one group of rows, for the layers of one stage. `capacity`: tokens that each row
    may have. `layers`: keys and values of each layer, `[B, K, R, D]` each, in the order of layers.
    R is the capacity, or the layer's window if that is shorter. Of a layer with a state: the last
    tokens before its convolution, `[B, count, C]`, and the state, `[B, H, D, V]`."""

    capacity: int
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def prompts(
        self, lengths: Sequence[int], device: torch.device, kernel: AttentionKernel | None = None
    ) -> PackedDocuments:
        """Returns the documents of the first forward: rows of `lengths` tokens, padded. The forward
        must go through all layers of the stage, once and in order."""
        target = max(lengths)
        whole = PackedDocuments.of_rows([[length] for length in lengths], target, kernel=kernel)
        whole = whole.moved(lambda tensor: tensor.to(device))
        ends = tuple(length - 1 for length in lengths)
        return replace(whole, across=_Cached(self, whole, torch.tensor(ends, device=device), ends))

    def next_token(self, positions: Sequence[int], device: torch.device) -> PackedDocuments:
        """Returns the documents of a later forward: one token of each row, at its position."""
        positions_B = torch.tensor(positions, device=device)
        borders = torch.arange(len(positions) + 1, dtype=torch.int32, device=device)
        across = _Cached(self, None, positions_B, tuple(positions))
        return PackedDocuments((1,) * len(positions), borders, positions_B + 1, across=across)


@dataclass(eq=False)
class _Cached:
    """Attention of one forward, which fills the cache of each layer in turn (`AttentionAcross`).
    `prompts`: the documents of the first forward; None in later ones. `positions_B`: the position
    of each row's last token, int64 `[B]`. `layer`: the number of the next layer."""

    cache: KeyValueCache
    prompts: PackedDocuments | None
    positions_B: Tensor
    positions: tuple[int, ...]
    layer: int = 0

    def __call__(
        self, q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, rule: AttentionRule, sinks_H: Tensor | None
    ) -> Tensor:
        """Computes `[S, H, D]`; see `AttentionAcross`."""
        index, self.layer = self.layer, self.layer + 1
        if self.prompts is None:
            return self._decode(index, q_SHD, k_SKD, v_SKD, rule, sinks_H)
        self.cache.layers.append((self._kept(k_SKD, rule), self._kept(v_SKD, rule)))
        attend = (self.prompts.kernel or PLAIN).attend
        return attend(q_SHD, k_SKD, v_SKD, self.prompts, rule.within(self.prompts.max_len), sinks_H)

    def states(self) -> _CachedStates:
        """Returns the cache of the next layer, which has a state."""
        index, self.layer = self.layer, self.layer + 1
        return _CachedStates(self.cache, index, self.positions, self.prompts)

    def _kept(self, part_SKD: Tensor, rule: AttentionRule) -> Tensor:
        """Returns the slots `[B, K, R, D]` after the first forward, of keys or values `[S, K, D]`.
        What padding leaves in a slot is overwritten before a query sees it."""
        rows, (_, heads, width) = len(self.positions), part_SKD.shape
        part_BTKD = part_SKD.view(rows, -1, heads, width)
        slots = self.cache.capacity if rule.window is None else min(rule.window, self.cache.capacity)
        if part_BTKD.shape[1] <= slots:
            room = part_SKD.new_zeros(rows, heads, slots, width)
            room[:, :, : part_BTKD.shape[1]] = part_BTKD.transpose(1, 2)
            return room
        # The newest position of each row in each slot; where there is none yet, any.
        ends_B1 = self.positions_B[:, None]
        newest_BR = (ends_B1 - (ends_B1 - torch.arange(slots, device=part_SKD.device)) % slots).clamp(min=0)
        rows_B1 = torch.arange(rows, device=part_SKD.device)[:, None]
        return part_BTKD[rows_B1, newest_BR].transpose(1, 2).contiguous()

    def _decode(
        self, index: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, rule: AttentionRule, sinks_H: Tensor | None
    ) -> Tensor:
        """Stores one token per row in layer `index`; returns its attention `[B, H, D]`. Takes
        queries `[B, H, D]`, keys and values `[B, K, D]`."""
        keys, values = self.cache.layers[index]
        slots = keys.shape[2]
        rows_B = torch.arange(len(self.positions), device=keys.device)
        keys[rows_B, :, self.positions_B % slots] = k_BKD
        values[rows_B, :, self.positions_B % slots] = v_BKD
        first, end = 0, max(self.positions) + 1
        if rule.window is not None:
            first = max(0, min(self.positions) + 1 - rule.window)
        at_N = torch.arange(first, end, device=keys.device)
        seen_BN = at_N <= self.positions_B[:, None]
        if rule.window is not None:
            seen_BN &= at_N > self.positions_B[:, None] - rule.window
        if end <= slots:
            keys, values = keys[:, :, first:end], values[:, :, first:end]
        else:  # in the order of positions, so that sums have the same order as without a window
            keys, values = keys[:, :, at_N % slots], values[:, :, at_N % slots]
        return attend_one(q_BHD, keys, values, seen_BN, rule, sinks_H)

    def moved(self, move: Move) -> _Cached:
        """Returns itself: a cache is already on the device of its rank."""
        return self


@dataclass(eq=False)
class _CachedStates:
    """The states of one layer (`StatesAcross`). In the first forward, the padding of a row is a
    piece of its own. `tails`: the last tokens before the convolution, `[B, count, C]`."""

    cache: KeyValueCache
    index: int
    positions: tuple[int, ...]
    prompts: PackedDocuments | None
    tails: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def lengths(self) -> tuple[int, ...]:
        if self.prompts is None:
            return (1,) * len(self.positions)
        pairs = zip(self.positions, self.prompts.lengths, strict=True)
        return tuple(size for last, whole in pairs for size in (last + 1, whole - last - 1) if size)

    @property
    def _rows(self) -> list[int]:
        """The piece of each row's tokens."""
        whole = [1] * len(self.positions) if self.prompts is None else self.prompts.lengths
        padded = [last + 1 < length for last, length in zip(self.positions, whole, strict=True)]
        return [row + sum(padded[:row]) for row in range(len(padded))]

    def before(self, x_SC: Tensor, count: int) -> Tensor:
        """Returns the tokens before each piece, `[P, count, C]`."""
        pieces = torch.split(x_SC, list(self.lengths))
        if self.prompts is None:
            known = self.cache.layers[self.index][0]
        else:
            known = x_SC.new_zeros(len(pieces), count, x_SC.shape[1])
        self.tails = torch.stack([torch.cat((known[row], pieces[row]))[-count:] for row in self._rows])
        return known

    def starts(self, summary: Callable[[], Tensor]) -> Tensor | None:
        """Returns the state before each piece, `[P, H, D, V]`; None: 0."""
        return self.cache.layers[self.index][1] if self.prompts is None else None

    def ended(self, states: Tensor) -> None:
        """Keeps the states after the rows, of those after the pieces, `[P, H, D, V]`."""
        kept = self.tails, states[self._rows]
        if self.prompts is None:
            self.cache.layers[self.index] = kept
        else:
            self.cache.layers.append(kept)


def attend_one(
    q_BHD: Tensor, k_BKND: Tensor, v_BKND: Tensor, seen_BN: Tensor, rule: AttentionRule, sinks_H: Tensor | None
) -> Tensor:
    """Computes the attention of one query per row.

    Args:
        q_BHD: Queries `[B, H, D]`.
        k_BKND: Keys `[B, K, N, D]`.
        v_BKND: Values `[B, K, N, D]`.
        seen_BN: The keys that each row's query sees, bool `[B, N]`.
        rule: The layer's rule; its window is in `seen_BN`.
        sinks_H: The scores of the sinks, `[H]`; given if the rule has sinks.

    Returns:
        The output `[B, H, D]`.
    """
    heads, kv_heads, dtype = q_BHD.shape[1], k_BKND.shape[1], q_BHD.dtype
    wide = torch.promote_types(dtype, torch.float32)
    if dtype != wide and rule.soft_cap is None and sinks_H is None:
        # Products in half precision would round the scores.
        out_BH1D = F.scaled_dot_product_attention(
            q_BHD[:, :, None],
            k_BKND,
            v_BKND,
            attn_mask=seen_BN[:, None, None],
            scale=rule.scale,
            enable_gqa=heads != kv_heads,
        )
        return out_BH1D[:, :, 0]
    scale = q_BHD.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    q_BKGD = q_BHD.to(wide).view(len(q_BHD), kv_heads, heads // kv_heads, -1)
    scores_BKGN = q_BKGD @ k_BKND.to(wide).transpose(-1, -2) * scale
    if rule.soft_cap is not None:
        scores_BKGN = (scores_BKGN / rule.soft_cap).tanh() * rule.soft_cap
    scores_BKGN = scores_BKGN.masked_fill(~seen_BN[:, None, None], float("-inf"))
    lse_BKG1 = scores_BKGN.logsumexp(-1, keepdim=True)
    if sinks_H is not None:
        lse_BKG1 = torch.logaddexp(lse_BKG1, sinks_H.to(wide).view(kv_heads, -1, 1))
    out_BKGD: Tensor = (scores_BKGN - lse_BKG1).exp() @ v_BKND.to(wide)
    return out_BKGD.flatten(1, 2).to(dtype)
