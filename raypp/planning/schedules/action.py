"""Actions, the computations of a schedule: `0F1` is the forward of microbatch 1 on stage 0."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, cast, get_args

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_FORM = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One computation. A tuple, because programs have a hundred thousand of them. `kind`: F
    forward, B backward, I gradient of the input only, W gradient of the weights only (after I)."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads an action from its printed form. Raises ValueError: the text is not an action."""
        match = _FORM.fullmatch(text.strip())
        if not match:
            raise ValueError(f"{text!r} is not an action; an action looks like 0F1 (stage, F|B|I|W, microbatch)")
        return cls(int(match[1]), cast(Kind, match[2]), int(match[3]))


Program = Mapping[int, Sequence[Action]]
"""The actions of every pipeline rank, in order. Communication is derived from them."""


def with_whole_backwards(program: Program) -> Program:
    """Returns a program whose backwards are whole: I becomes B, and W is left out. The other
    actions keep their order, so gradients are sent as early as before. For compiled blocks: their
    backward is one graph, which computes the gradients of weights, too. Products outside the
    compiled parts would have weight gradients for W again, but no fusions around them; worth
    measuring on a GPU."""
    return {
        rank: [Action(a.stage, "B", a.microbatch) if a.kind == "I" else a for a in actions if a.kind != "W"]
        for rank, actions in program.items()
    }


def without_idle_backwards(program: Program, trained: Sequence[bool]) -> Program:
    """Returns a program without the backwards that no trained parameter needs. Stages below the
    lowest one that trains have no backward. That one sends no gradient, and its backward is whole,
    as is that of a stage without trained parameters, which computes its input's gradient only.
    `program`: of a training step. `trained`: whether a stage has trained parameters, by stage."""
    if all(trained):
        return program
    lowest = min((stage for stage, trains in enumerate(trained) if trains), default=len(trained))

    def kept(action: Action) -> Action | None:
        if action.kind == "F" or (trained[action.stage] and action.stage != lowest) or lowest == action.stage == 0:
            return action
        if action.stage < lowest or action.kind == "W":
            return None
        return Action(action.stage, "B", action.microbatch)

    return {rank: [new for a in actions if (new := kept(a)) is not None] for rank, actions in program.items()}


def stages_with_backward(program: Program) -> set[int]:
    """Returns the stages that have a backward: those that need the gradients of their outputs."""
    return {action.stage for actions in program.values() for action in actions if action.kind in ("B", "I")}


def splits_backward(program: Program) -> bool:
    """Returns whether a program computes the gradients of inputs and weights separately."""
    return any(action.kind == "W" for actions in program.values() for action in actions)


def printed(actions: Iterable[Action]) -> str:
    """Formats the actions of a rank on one line: `0F0 0F1 0B0`."""
    return " ".join(map(str, actions))


def parse_actions(text: str) -> list[Action]:
    """Reads actions that blanks or commas separate. Raises ValueError: a word is no action."""
    return [Action.parse(word) for word in text.replace(",", " ").split()]
