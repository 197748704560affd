"""DualPipeV: two stages per rank in a V; pairs forwards of one with backwards of the other.

It has eight phases, whose lengths depend on the rank (DeepSeek-V3, arXiv:2412.19437, in the "cut in
half" variant by Sea AI Lab). Here, the two actions of a pair run one after the other. The benefit
that remains: a rank always has independent work while a message is in flight.
"""

from collections import Counter, deque

from raypp.kinds import ScheduleKind
from raypp.planning.schedules.action import Action, Kind, Program

KIND = ScheduleKind(
    "dualpipev",
    "forward and backward overlapped, two stages per rank placed in a V",
    position=7,
    placement="v",
    stages_per_rank=(2, 2),
    microbatches_per_rank=2,
    reason="its phases need two microbatches per rank, one for each of its stages",
    splits_backward=True,
    source="arXiv:2412.19437",
)


def build(pp: int, stages_per_rank: int, microbatches: int, lookahead: int = 0) -> Program:
    """Builds the program of every rank. Rank r holds the stages r and 2·pp - 1 - r. It needs at
    least 2·pp microbatches. `lookahead` is the number of microbatches by which a rank runs further
    ahead for each link that a result crosses before the rank uses it: from the forward of its first
    stage to that of its second, from there to the backward of its second, and from there to the
    backward of its first."""
    return {rank: _rank(pp, rank, microbatches, lookahead) for rank in range(pp)}


def _rank(pp: int, rank: int, microbatches: int, lookahead: int) -> list[Action]:
    below, up_to = pp - 1 - rank, rank + 1
    line = _Line(rank, 2 * pp - 1 - rank, microbatches)
    line.repeat(2 * below + 2 * lookahead * below, "down F")
    line.repeat(up_to + lookahead * rank, "down F, up F")
    line.repeat(below + lookahead * below, "up I, W, up F")
    line.repeat(line.left("down F"), "down F, up B, up F, down B")
    line.repeat(line.left("up F"), "up B, up F, down B")
    # The second half of the last backwards is split. Their weight gradients fill the gaps after
    # them.
    whole = up_to // 2
    line.repeat(line.left("up B") - up_to + whole, "up B, down B")
    if up_to % 2:
        line.repeat(1, "up B, down I")
        whole += 1
    line.repeat(up_to - whole, "up I, down I")
    line.repeat(line.left("down B"), "W, down I")
    line.drain()
    return line.actions


class _Line:
    """Collects the actions of a rank; tracks microbatches and pending weight gradients. Actions of
    more microbatches than there are, are left out."""

    def __init__(self, down: int, up: int, microbatches: int) -> None:
        self.stage, self._microbatches = {"down": down, "up": up}, microbatches
        self.actions: list[Action] = []
        self._count: Counter[tuple[str, int]] = Counter()
        self._owed: deque[tuple[int, int]] = deque()

    def repeat(self, times: int, phase: str) -> None:
        """Appends a phase, written as `down F, up B, W`, `times` times."""
        for _ in range(times):
            for step in phase.split(", "):
                self._append(step)

    def left(self, step: str) -> int:
        """Returns the microbatches for which a step is not done yet."""
        return self._microbatches - self._count[self._counted(step)]

    def drain(self) -> None:
        """Appends all pending weight gradients."""
        while self._owed:
            self._append("W")

    def _append(self, step: str) -> None:
        if step == "W":
            if self._owed:
                stage, microbatch = self._owed.popleft()
                self.actions.append(Action(stage, "W", microbatch))
            return
        if not self.left(step):
            return
        counted = self._counted(step)
        known: dict[str, Kind] = {"F": "F", "B": "B", "I": "I"}
        kind, stage, microbatch = known[step[-1]], counted[1], self._count[counted]
        self._count[counted] += 1
        self.actions.append(Action(stage, kind, microbatch))
        if kind == "I":
            self._owed.append((stage, microbatch))

    def _counted(self, step: str) -> tuple[str, int]:
        way, kind = step.split()
        return "forward" if kind == "F" else "backward", self.stage[way]
