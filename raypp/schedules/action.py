"""Actions, the computations of a schedule: `0F1` is the forward of microbatch 1 on stage 0."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

Kind = Literal["F", "B", "I", "W"]
_FORM = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One computation.

    Attributes:
        stage: Index of the stage.
        kind: F forward, B backward, I gradient of the input only, W gradient of the weights only
            (after I).
        microbatch: Index of the microbatch.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads an action from its printed form.

        Raises:
            ValueError: The text is not an action.
        """
        found = _FORM.fullmatch(text.strip())
        if not found:
            raise ValueError(f"{text!r} is not an action; an action looks like 0F1 (stage, F|B|I|W, microbatch)")
        return cls(int(found[1]), cast(Kind, found[2]), int(found[3]))


Program = Mapping[int, Sequence[Action]]
"""The actions of every pipeline rank, in order. Communication is derived from them."""


def printed(actions: Iterable[Action]) -> str:
    """Formats the actions of a rank on one line: `0F0 0F1 0B0`."""
    return " ".join(map(str, actions))


def parse_actions(text: str) -> list[Action]:
    """Reads the actions of one line, separated by blanks or commas.

    Raises:
        ValueError: A word is not an action.
    """
    return [Action.parse(word) for word in text.replace(",", " ").split()]
