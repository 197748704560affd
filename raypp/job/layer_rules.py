"""How a layer mixes tokens: its attention's rules, or sizes of the gated delta rule instead."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
