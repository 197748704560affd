"""How a layer's attention differs from plain causal attention."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
