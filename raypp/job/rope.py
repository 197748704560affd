"""The rotary encoding of a layer: its width, its base, and how its frequencies are scaled. Nothing
here imports torch; `raypp.stages.models.rotary` computes the tables."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from raypp.errors import Problem
from raypp.job import limits
from raypp.job.section import Section

RopeKind = Literal["linear", "dynamic", "yarn", "llama3", "longrope"]


class RopeOptions(Section):
    """Scaled rotary frequencies, for contexts longer than those of pretraining."""

    kind: RopeKind = "linear"
    """linear: positions divided by factor | dynamic: a base that grows with the length of each
    document | yarn: low frequencies divided by factor | llama3: the scaling of Llama 3.1 to 3.3 |
    longrope: one factor per frequency, as Phi 3 has them."""
    factor: float | None = Field(default=None, gt=0, le=limits.REAL)
    """Extension of the context. Must be given; longrope needs it only without attention_factor."""
    original_context: int | None = Field(default=None, ge=2, le=limits.COUNT)
    """Tokens of the context before the extension. Must be given, except for linear."""
    attention_factor: float | None = Field(default=None, gt=0, le=limits.REAL)
    """yarn and longrope: multiplies the table. null: computed from factor, as in their papers."""
    beta_fast: float | None = Field(default=None, gt=0, le=limits.REAL)
    """yarn: frequencies with more turns in the original context stay. null: 32."""
    beta_slow: float | None = Field(default=None, gt=0, le=limits.REAL)
    """yarn: frequencies with fewer turns in the original context are divided by factor. null: 1."""
    truncate: bool | None = None
    """yarn: round the range of frequencies between the two to whole indices. null: true."""
    low_freq_factor: float | None = Field(default=None, gt=0, le=limits.REAL)
    """llama3: frequencies with fewer turns in the original context are divided by factor."""
    high_freq_factor: float | None = Field(default=None, gt=0, le=limits.REAL)
    """llama3: frequencies with more turns in the original context stay."""
    short_factor: tuple[float, ...] | None = None
    """longrope: divisors of the frequencies in documents within the original context."""
    long_factor: tuple[float, ...] | None = None
    """longrope: divisors of the frequencies in longer documents."""


@dataclass(frozen=True)
class Rotary:
    """What the queries and keys of a layer are rotated by. Layers with equal ones share a table.

    Attributes:
        width: Number of leading dims of each head that are rotated; even.
        theta: Base of the frequencies.
        scaling: How the frequencies are scaled; None: not at all.
        turned: Share of the frequencies, the first ones, that are not 0.
        growth: Queries at position p are multiplied by 1 + growth · ln(1 + floor(p / context)).
    """

    width: int
    theta: float
    scaling: RopeOptions | None = None
    turned: float = 1.0
    growth: float = 0.0
    context: int = 1

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of a document."""
        return self.scaling is not None and self.scaling.kind in ("dynamic", "longrope")


CONTEXT_FIXING: tuple[RopeKind, ...] = ("dynamic", "yarn", "longrope")
"""Kinds whose frequencies transformers computes from config.json's context."""
NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_context"),
    "yarn": ("factor", "original_context"),
    "llama3": ("factor", "original_context", "low_freq_factor", "high_freq_factor"),
    "longrope": ("original_context", "short_factor", "long_factor"),
}
"""Keys that a kind needs, in addition to `kind`."""
TAKEN: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
"""Keys that a kind takes besides."""


def rope_problems(scaling: RopeOptions, width: int, key: str) -> Iterator[Problem]:
    """Finds keys that the kind lacks or does not use, and values that contradict each other."""
    needed, taken = NEEDED[scaling.kind], TAKEN.get(scaling.kind, ())
    for name, value in scaling:
        if name != "kind" and value is None and name in needed:
            yield Problem(f"{key}.{name}", f"is missing: kind {scaling.kind} needs it", f"set {', '.join(needed)}")
        elif name != "kind" and value is not None and name not in (*needed, *taken):
            yield Problem(f"{key}.{name}", f"kind {scaling.kind} does not use it", "remove the key")
    if scaling.kind == "longrope":
        if scaling.factor is None and scaling.attention_factor is None:
            fault = "is missing: kind longrope needs it or attention_factor"
            yield Problem(f"{key}.factor", fault, "set it to the extended context / original_context")
        for name in ("short_factor", "long_factor"):
            given = getattr(scaling, name)
            if given is not None and len(given) != width // 2:
                fault = f"has {len(given)} numbers, but {width} rotated dims of a head have {width // 2} frequencies"
                yield Problem(f"{key}.{name}", fault, f"give {width // 2} numbers")
    if scaling.kind == "dynamic" and width < 4:
        yield Problem(f"{key}.kind", f"dynamic needs at least 4 rotated dims, a head has {width}", "use another kind")
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.kind == "llama3" and low is not None and high is not None and high <= low:
        fault = f"{high:g} is not more than low_freq_factor {low:g}"
        yield Problem(f"{key}.high_freq_factor", fault, "use a larger one, for example 4 with low_freq_factor 1")
