"""The keys of the job file whose value names a kind, and the names each of them accepts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from raypp.kinds import OPTIMIZERS, POLICIES, SCHEDULES, SOURCES, TRACKERS
from raypp.registry import Kind, Registry
from raypp.spec.families import MODELS

_FUNCTION = re.compile(r"^[^:]+:[^:]+$")


@dataclass(frozen=True)
class Choice:
    """The names that one key accepts.

    Attributes:
        registry: The kinds that a name may refer to.
        others: Further names that are not in the registry.
        own: Pattern of a user's own kind.
    """

    registry: Registry[Any]
    others: tuple[Kind, ...] = ()
    own: re.Pattern[str] = _FUNCTION

    def kinds(self) -> list[Kind]:
        """Returns the kind of each name, in display order."""
        return [*self.registry, *self.others]

    def words(self) -> list[str]:
        return [kind.name for kind in self.kinds()]

    def available(self) -> list[str]:
        """Returns the names that work in this version."""
        return [kind.name for kind in self.kinds() if kind.available]

    def is_own(self, word: str) -> bool:
        """Whether a name has the form of a user's own kind."""
        return self.own.search(word) is not None

    def works(self, word: str) -> bool:
        """Whether this version accepts a name.

        Does not check that a user's own kind can be imported.
        """
        if any(kind.name == word for kind in self.others):
            return True
        return bool(self.registry.get(word).available) if word in self.registry else self.is_own(word)


_AUTO = Kind("auto", "chosen from the numbers of stages per rank and microbatches; mostly 1f1b")

CHOICES: dict[str, Choice] = {
    "model.kind": Choice(MODELS),
    "data.kind": Choice(SOURCES),
    "pipeline.schedule": Choice(SCHEDULES, (_AUTO,), re.compile(r"^[^:]+:[^:]+$|\.csv$")),
    "train.optimizer.kind": Choice(OPTIMIZERS),
    "recovery.policy": Choice(POLICIES),
    "observe.trackers.kind": Choice(TRACKERS),
}
"""Every key of the job file that names a kind."""
