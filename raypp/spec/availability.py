"""The keys of a job file whose value is a word, and which words there are. The registries' kinds tell it themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raypp.kinds import OPTIMIZERS, POLICIES, SCHEDULES, SOURCES
from raypp.registry import Kind, Registry
from raypp.spec.families import MODELS


@dataclass(frozen=True)
class Choice:
    """A key whose value is a word.

    Attributes:
        registry: The kinds that the word may name.
        others: Further words, which name no kind of the registry.
        own: What a user's own looks like; None: there is no own.
    """

    registry: Registry[Any]
    others: tuple[Kind, ...] = ()
    own: re.Pattern[str] | None = None

    def kinds(self) -> Iterator[Kind]:
        """What each word stands for, in the order in which they are listed."""
        yield from self.registry
        yield from self.others

    def words(self) -> list[str]:
        return [kind.name for kind in self.kinds()]

    def available(self) -> list[str]:
        """The words that work in this version."""
        return [kind.name for kind in self.kinds() if kind.available]

    def is_own(self, word: str) -> bool:
        """Whether a word is the form of a user's own."""
        return self.own is not None and self.own.search(word) is not None

    def works(self, word: str) -> bool:
        """Whether this version takes the word; whether a user's own can be imported is found out later."""
        for kind in self.others:
            if kind.name == word:
                return kind.available
        if word in self.registry:
            return bool(self.registry.get(word).available)
        return self.is_own(word)


_FUNCTION = re.compile(r"^[^:]+:[^:]+$")
_AUTO = Kind("auto", "the one that the plan predicts to be fastest")

CHOICES: dict[str, Choice] = {
    "model.kind": Choice(MODELS, own=_FUNCTION),
    "data.kind": Choice(SOURCES, own=_FUNCTION),
    "pipeline.schedule": Choice(SCHEDULES, (_AUTO,), own=re.compile(r"^[^:]+:[^:]+$|\.csv$")),
    "train.optimizer.kind": Choice(OPTIMIZERS, own=_FUNCTION),
    "recovery.policy": Choice(POLICIES, own=_FUNCTION),
}
"""Every key of the job file whose type is plain text and whose value is a word."""
