"""How a layer mixes tokens: its attention's rules, or sizes of what it has instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

CHUNK = 64
"""Tokens whose updates of the state are computed together."""


@dataclass(frozen=True)
class AttentionRule:
    """The rule of one layer. Documents and causality apply in any case.

    Attributes:
        window: A query sees this many tokens, itself included. None: its whole document so far.
        soft_cap: Scores s become cap · tanh(s / cap). None: no cap.
        scale: Factor of the scores before the cap. None: head width ** -0.5.
        sinks: Each head has a learned score that takes part in the softmax and has no value.
    """

    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    sinks: bool = False

    def within(self, tokens: int) -> AttentionRule:
        """Returns the rule without its window if no document of `tokens` tokens exceeds it."""
        return replace(self, window=None) if self.window is not None and self.window >= tokens else self

    @property
    def special(self) -> bool:
        """Whether the rule has more than torch's own attention computes."""
        return self.window is not None or self.soft_cap is not None or self.sinks


NO_RULE = AttentionRule()
"""Plain causal attention."""


@dataclass(frozen=True)
class DeltaRule:
    """Sizes of one layer. Each value head has a state, `[key_dim, value_dim]`. `key_heads`: heads
    of queries and keys. Each serves `value_heads / key_heads` value heads. `kernel`: tokens that
    the causal convolution of queries, keys and values reads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    block: ClassVar[str] = "linear_attn"
    """The name of what computes it in a layer."""

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of what the convolution takes: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def divided(self) -> Mapping[str, int]:
        """By option: what the ranks of a tp group divide."""
        return {"linear_num_key_heads": self.key_heads}

    @property
    def change(self) -> int:
        """The numbers that say how a part of a document changes the states."""
        return self.value_heads * self.key_dim * (self.key_dim + self.value_dim)

    def kept(self, wide: int) -> tuple[int, int, int]:
        """Returns the values per token that a forward keeps, with "selective" and without
        recomputation, and those between the halves of a backward. It keeps its inputs only; the
        gated norm is in fp32, of which a value is `wide` of the compute dtype."""
        product = self.channels + 2 * self.values + 2 * self.value_heads
        kept = 2 * self.channels + (3 + 3 * wide) * self.values + (1 + 3 * wide) * self.value_heads
        return product, kept, product

    def flops(self, seq_len: int) -> float:
        """Returns the FLOPs of the forward per token, without products with weights. Within a chunk
        of L tokens: scores of keys and queries with keys, a triangular system for values and keys,
        and scores times values; with the state: two reads and one update."""
        length, key, value = min(CHUNK, seq_len), self.key_dim, self.value_dim
        within = 4 * length * key + length * (key + value) + 2 * length * value
        return float(self.value_heads * (within + 6 * key * value))

    def backward_bytes(self, seq_len: int) -> int:
        """Returns the bytes per token of the chunks and states that a backward computes again, with
        their gradients, all in fp32. The counts are those of a played backward, rounded up."""
        length, key, value = min(CHUNK, seq_len), self.key_dim, self.value_dim
        each = 5 * key + 5 * value + 7 * length + key * value // (2 * length)
        return 4 * (self.value_heads * each + 10 * self.keys)


@dataclass(frozen=True)
class ShortConvolution:
    """Sizes of one layer that mixes tokens by a causal convolution alone, between two gates. The
    fields and methods mean what those of `DeltaRule` do; a document's state is its last tokens."""

    channels: int
    kernel: int

    block: ClassVar[str] = "conv"
    change: ClassVar[int] = 0

    @property
    def divided(self) -> Mapping[str, int]:
        return {"hidden_size": self.channels}

    def kept(self, wide: int) -> tuple[int, int, int]:
        return 3 * self.channels, 6 * self.channels, 4 * self.channels

    def flops(self, seq_len: int) -> float:
        return 0.0

    def backward_bytes(self, seq_len: int) -> int:
        return 4 * 6 * self.channels


StateRule = DeltaRule | ShortConvolution
