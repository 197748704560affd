"""The fault table: which faults hit which run, in which order.

A run goes through a chain of faults, because surviving is cheaper than starting. Strikes that end
an attempt are more than a checkpoint interval apart, or hit the start of the next attempt. In the
second case the recovery itself is hit.
"""

from dataclasses import dataclass
from typing import Any

from injected_faults import Strike

STEPS, EVERY = 60, 5
HANG_S = 4.0


@dataclass(frozen=True)
class Chain:
    """A run of a shape (a key of SHAPES), perhaps with the memory tier, and its faults in order."""

    name: str
    shape: str
    tier: bool
    strikes: tuple[Strike, ...]


SHAPES: dict[str, dict[str, Any]] = {
    "three stages": {"mesh": {"pp": 3}},
    "two stages, two replicas": {"mesh": {"pp": 2, "dp_replicate": 2}},
}
WORLD = {"three stages": 3, "two stages, two replicas": 4}
VICTIMS = {
    "three stages": ("first stage", "middle stage", "last stage"),
    "two stages, two replicas": ("rank 0", "rank 1", "rank 2", "rank 3"),
}


def _chain(name: str, shape: str, tier: bool, *rows: tuple[Any, ...]) -> Chain:
    """Builds a chain. Each row is rank, moment, kind, step, and further Strike fields by name."""
    strikes = []
    for number, (rank, moment, kind, step, *rest) in enumerate(rows):
        strikes.append(Strike(number, rank, moment, kind, step, **(rest[0] if rest else {})))
    return Chain(name, shape, tier, tuple(strikes))


CONTROLLER, DRIVER, STORE = {"outside": "controller"}, {"outside": "driver"}, {"outside": "store"}

EACH_KIND = "each-kind"
"""The chain that runs before a change lands: a fault of each kind."""
CHAINS = (
    _chain(
        EACH_KIND, "three stages", True,
        (0, "forward", "", 7, CONTROLLER),
        (0, "save", "", 10, STORE),
        (2, "backward", "kill", 17, CONTROLLER),
        (1, "forward", "freeze", 27),
        (2, "optimizer", "raise", 34),
        (1, "forward", "", 37, DRIVER),
        (0, "commit", "segfault", 40),
    ),
    _chain(
        "killed-anywhere", "three stages", False,
        (2, "rendezvous", "kill", 0),
        (0, "first step", "kill", 0),
        (1, "forward", "kill", 7),
        (0, "build", "kill", 0),
        (2, "backward", "kill", 14),
        (1, "load", "kill", 0),
        (0, "optimizer", "kill", 22),
        (0, "rendezvous", "kill", 0),
        (2, "save", "kill", 30),
        (0, "load", "kill", 0),
        (0, "commit", "kill", 40),
        (0, "committed", "kill", 50),
        (2, "last step", "kill", 60),
        (1, "finish", "kill", 60),
    ),
    _chain(
        "other-kinds", "three stages", True,
        (1, "build", "segfault", 0),
        (0, "forward", "segfault", 7),
        (2, "backward", "raise", 13),
        (0, "optimizer", "raise", 19),
        (1, "forward", "freeze", 26),
        (2, "load", "raise", 0),
        (2, "backward", "hang", 33),
        (0, "optimizer", "kill", 40, {"also": (2,)}),
        (1, "rendezvous", "segfault", 0),
        (1, "forward", "kill", 47, {"also": (0, 2)}),
        (0, "save", "segfault", 55),
        (1, "optimizer", "hang", 58),
        (2, "last step", "raise", 60),
    ),
    _chain(
        "second-replica", "two stages, two replicas", True,
        (1, "first step", "kill", 0),
        (3, "forward", "segfault", 8),
        (1, "load", "kill", 0),
        (2, "optimizer", "kill", 16),
        (1, "backward", "kill", 25, {"also": (0,)}),
        (3, "backward", "freeze", 33),
        (2, "backward", "nan", 38),
        (1, "forward", "raise", 45),
        (1, "finish", "kill", 60),
    ),
    _chain(
        "leaders", "three stages", True,
        (1, "rendezvous", "", 0, CONTROLLER),
        (0, "forward", "", 7, CONTROLLER),
        (0, "save", "", 10, STORE),
        (0, "commit", "", 20, CONTROLLER),
        (1, "backward", "kill", 27, CONTROLLER),
        (0, "load", "", 0, STORE),
        (2, "first step", "", 0, CONTROLLER),
        (1, "forward", "", 33, DRIVER),
        (0, "committed", "", 40, CONTROLLER),
        (0, "last step", "", 60, CONTROLLER),
        (1, "finish", "kill", 60),
    ),
)  # fmt: skip

CASES = [(chain, strike) for chain in CHAINS for strike in chain.strikes]


def title(chain: Chain, strike: Strike) -> str:
    victim = VICTIMS[chain.shape]
    who = [victim[rank] for rank in (strike.rank, *strike.also)]
    what = {"": "", "kill": "SIGKILL", "segfault": "SIGSEGV", "freeze": "SIGSTOP", "raise": "an exception"}.get(
        strike.kind, strike.kind
    )
    parts = [f"{what} of {' and '.join(who)}"] if what else []
    if strike.outside:
        silence = "the store silent" if strike.outside == "store" else f"SIGKILL of the {strike.outside}"
        parts.insert(0, silence)
    return " and ".join(parts)
