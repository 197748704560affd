"""Fuzzes whatever reads input of others: `make fuzz MINUTES=10`, or `python -m tests.fuzz --help`.

A target is a function `bytes -> None` in a file of this folder, `tests/fuzz/SUBJECT.py`:

```python
from tests.fuzz import target


@target(b'{"size": 3}', b'{"size": 4, "extra": {}}')
def commit(data: bytes) -> None:
    Commit.from_bytes(data, "run/step-1/COMMIT")
```

The arguments are valid samples, small ones: the target must accept each of them, without an error,
and the runner mutates them. One that takes long to make is given as a function. The runner
recognises JSON, lines of JSON, and JSON behind a length of 8 bytes (safetensors); it changes their
values, keys and structure. It changes the bytes of every sample.
`words=(b"&a", b"*a")` are pieces that it inserts and that the format gives a meaning.

A target fails when it raises anything but a `RayppError`, takes more than 2 s of CPU or 20 s in
all, or adds more than 200 MB to the process. It returns, or raises a `RayppError`, for any other
input. What it opens, it closes; what it writes goes to a `tempfile.TemporaryDirectory`. It must not
depend on what came before, otherwise a failure cannot be replayed.

`tests/unit/hostile/test_fuzz_targets.py` gives every target its samples and a few mutations.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

Run = Callable[[bytes], None]
Sample = bytes | Callable[[], bytes]


@dataclass(frozen=True)
class Target:
    """A function to fuzz.

    Attributes:
        name: `SUBJECT.FUNCTION`.
        run: The function.
        given: Inputs that it accepts, or functions that return one.
        words: Pieces with a meaning in its format.
    """

    name: str
    run: Run
    given: Sequence[Sample]
    words: Sequence[bytes]

    @cached_property
    def samples(self) -> list[bytes]:
        return [one() if callable(one) else one for one in self.given]


_found: dict[str, Target] = {}


def target(*samples: Sample, words: Sequence[bytes] = (), name: str = "") -> Callable[[Run], Run]:
    """Registers the decorated function, by its name or this one, with these samples and words."""

    def register(run: Run) -> Run:
        full = f"{run.__module__.rpartition('.')[2]}.{name or run.__name__}"
        _found[full] = Target(full, run, samples, words)
        return run

    return register


def all_targets() -> list[Target]:
    """Imports every file of this folder, and returns the targets by name."""
    for module in pkgutil.iter_modules(__path__):
        if module.name not in ("__main__", "mutations", "runner"):
            importlib.import_module(f"{__name__}.{module.name}")
    return [_found[name] for name in sorted(_found)]
