"""Runs ranks with another torch: in the Python that `RAYPP_OTHER_TORCH` names.

That Python's environment has raypp and its development dependencies, but a different torch. `make
test-torch211` sets the variable.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from harness import run_in_turn

OTHER = os.environ.get("RAYPP_OTHER_TORCH", "")
needs_other_torch = pytest.mark.skipif(
    not OTHER, reason="RAYPP_OTHER_TORCH names no Python with another torch; `make test-torch211` does"
)
TIMEOUT_S = 400.0
"""Less than a test may take that waits for two such runs."""
TESTS = Path(__file__).parents[1]


def run_in_turn_with_other_torch(
    world: int, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]
) -> list[list[Any]]:
    """Like `harness.run_in_turn`, with the other torch."""
    with TemporaryDirectory(prefix="raypp-other-torch-") as folder:
        request, answer = Path(folder, "request"), Path(folder, "answer")
        torch.save((world, function, list(cases)), request)
        ran = subprocess.run(
            [OTHER, __file__, request, answer],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(str(TESTS / name) for name in ("ranks", "servers"))},
            capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        assert ran.returncode == 0, f"{OTHER} failed:\n{ran.stderr}"
        version, results = torch.load(answer, weights_only=False)
    assert version != torch.__version__, f"{OTHER} has the same torch {version} as this Python"
    return results


def main(request: Path, answer: Path) -> None:
    results = run_in_turn(*torch.load(request, weights_only=False))
    torch.save((torch.__version__, results), answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
