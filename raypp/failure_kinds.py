"""The kinds of failure, and what each of them means for the process, the node and the run.

This is the only place that knows: whoever has to decide asks a kind for its traits. The text of a kind stands in
events, in stores and in what commands print, so it never changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Traits:
    """What a kind of failure means.

    Attributes:
        words: One line for people.
        permanent: Every attempt would meet it again: the run ends at once.
        recurring: It comes from the program and its numbers: the same again at the same step ends the run.
        witness: The consequence of another rank's failure. It blames nobody, and does not explain by itself why an
            attempt ended.
        counts: A restart after it counts against `recovery.max_restarts`.
        keeps_process: The process is as good as before and can take another seat.
        ends_process: The process may still live, but must be ended: it does not answer, or has to go.
        node_lost: The node, or Ray on it, is gone; its ranks are not to blame.
        taints_snapshots: Snapshots in memory may hold the same error and are removed.
        symptom: Of an exception: when it was caused by a full disk or by too little memory, that is the failure.
        exit_code: Of a run that ends because of it (see `raypp.errors`).
    """

    words: str
    permanent: bool = False
    recurring: bool = False
    witness: bool = False
    counts: bool = True
    keeps_process: bool = False
    ends_process: bool = False
    node_lost: bool = False
    taints_snapshots: bool = False
    symptom: bool = False
    exit_code: int = 1


class FailureKind(StrEnum):
    """Why a rank failed. docs/reliability.md tells how each kind is noticed and what follows."""

    _value_: str
    traits: Traits

    KILLED = "killed", Traits("the process ended without a word")
    SEGFAULT = "segfault", Traits("the process was ended by a signal of native code")
    OUT_OF_MEMORY = "out_of_memory", Traits("memory was short", recurring=True)
    RAISED = "raised", Traits("an exception", recurring=True)
    USER_ERROR = "user_error", Traits("the job or its data are wrong", permanent=True, symptom=True, exit_code=2)
    NODE_LOST = "node_lost", Traits("the node is gone", node_lost=True)
    RAYLET_LOST = "raylet_lost", Traits("Ray's process on the node ended", node_lost=True)
    PREEMPTED = "preempted", Traits("the node was taken away on purpose", counts=False, ends_process=True)
    HUNG = "hung", Traits("the attempt stands still and waits for this rank", ends_process=True)
    STORE_DOWN = "store_down", Traits("the store does not answer, or refuses", symptom=True)
    UNREACHABLE = "unreachable", Traits("an address does not answer", symptom=True)
    DISK_FULL = "disk_full", Traits("a file system is full")
    NONFINITE = "nonfinite", Traits("loss or gradients are not finite", recurring=True, keeps_process=True)
    CORRUPT = "corrupt", Traits("weights are damaged", taints_snapshots=True)
    LOST_PEER = "lost_peer", Traits("another rank went away", witness=True, keeps_process=True)
    UNKNOWN = "unknown", Traits("nobody knows why")

    def __new__(cls, text: str, traits: Traits) -> FailureKind:
        kind = str.__new__(cls, text)
        kind._value_ = text
        kind.traits = traits
        return kind

    @classmethod
    def read(cls, text: str) -> FailureKind:
        """The kind of that text; UNKNOWN when this version has none, as in the events of another one."""
        return next((kind for kind in cls if kind == text), cls.UNKNOWN)
