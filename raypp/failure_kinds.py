"""The kinds of failure, and what each of them means for the process, the node and the run. Only
this file knows it: code that decides asks a kind for its traits. Events, stores and printed output
contain the text of a kind, so it never changes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Traits:
    """Properties of a kind of failure.

    Attributes:
        words: One line for people.
        permanent: Every attempt would fail the same way, so the run fails at once.
        recurring: The program or its numbers cause it. The same failure at the same step again
            fails the run.
        same_by_kind: For a recurring one: two failures at one step are the same whatever their
            causes say, because these contain measurements.
        witness: A consequence of another rank's failure. It does not blame this rank, and does not
            by itself explain why an attempt ended.
        counts: A restart after it counts against `recovery.max_restarts`.
        keeps_process: The process is intact and can take another seat.
        ends_process: The process may still run but must be ended: it does not respond, or its node
            is going away.
        node_lost: The node, or Ray on it, is gone. Its ranks are not to blame.
        taints_snapshots: Snapshots in memory may contain the same error and are removed.
        in_numbers: It was found in computed numbers, which say nothing after a communicator failed.
        symptom: For an exception: if a full disk or too little memory caused it, that is the
            failure instead.
        save_again: The store may be at fault and not the state: a run that was to save and stop
            starts again for that save.
        exit_code: Exit code of a run that ends because of it (see `raypp.errors`).
    """

    words: str
    permanent: bool = False
    recurring: bool = False
    same_by_kind: bool = False
    witness: bool = False
    counts: bool = True
    keeps_process: bool = False
    ends_process: bool = False
    node_lost: bool = False
    taints_snapshots: bool = False
    in_numbers: bool = False
    symptom: bool = False
    save_again: bool = False
    exit_code: int = 1


class FailureKind(StrEnum):
    """Why a rank failed. docs/reliability.md describes how each kind is detected and handled."""

    _value_: str
    traits: Traits

    KILLED = "killed", Traits("the process ended without a message")
    SEGFAULT = "segfault", Traits("a signal in native code ended the process")
    OUT_OF_MEMORY = "out_of_memory", Traits("the host is out of memory", recurring=True)
    DEVICE_OUT_OF_MEMORY = (
        "device_out_of_memory",
        Traits("the device is out of memory", recurring=True, same_by_kind=True),
    )
    DEVICE_TAKEN = "device_taken", Traits("other processes hold the device's memory")
    RAISED = "raised", Traits("an exception", recurring=True)
    USER_ERROR = "user_error", Traits("the job or its data are wrong", permanent=True, symptom=True, exit_code=2)
    NODE_LOST = "node_lost", Traits("the node is gone", node_lost=True)
    RAYLET_LOST = "raylet_lost", Traits("Ray's process on the node ended", node_lost=True)
    PREEMPTED = "preempted", Traits("the node was preempted", counts=False, ends_process=True)
    HUNG = "hung", Traits("the attempt hangs and waits for this rank", ends_process=True)
    STORE_DOWN = "store_down", Traits("the store does not respond, or refuses requests", symptom=True)
    UNREACHABLE = "unreachable", Traits("an address does not respond", symptom=True)
    DISK_FULL = "disk_full", Traits("a file system is full", save_again=True)
    SAVE_FAILED = (
        "save_failed",
        Traits("the last checkpoint could not be saved", symptom=True, keeps_process=True, save_again=True),
    )
    NOT_SAVED = ("not_saved", Traits("the store took no last checkpoint for minutes", permanent=True, save_again=True))
    NONFINITE = (
        "nonfinite",
        Traits("the loss or the gradients are not finite", recurring=True, keeps_process=True, in_numbers=True),
    )
    SPIKE = "spike", Traits("the loss jumped", permanent=True, in_numbers=True)
    CORRUPT = "corrupt", Traits("the weights are corrupt", taints_snapshots=True, in_numbers=True)
    LOST_PEER = "lost_peer", Traits("another rank went away", witness=True, keeps_process=True)
    UNKNOWN = "unknown", Traits("the cause is unknown")

    def __new__(cls, text: str, traits: Traits) -> FailureKind:
        kind = str.__new__(cls, text)
        kind._value_ = text
        kind.traits = traits
        return kind
