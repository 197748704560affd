"""Ranks come from a process that has imported what they need, and keep the environment of the
tests."""

from __future__ import annotations

import os
import sys

import pytest
from harness import OWN_PATH, run_ranks

pytestmark = pytest.mark.ranks


def told(rank: int, world: int, port: int) -> tuple[bool, dict[str, str]]:
    return "forked" in sys.modules, {name: os.environ[name] for name in ("PYTHONPATH", OWN_PATH) if name in os.environ}


def test_ranks_are_forked_from_a_prepared_process_and_keep_the_path_of_the_tests() -> None:
    own = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    assert run_ranks(2, told) == [(True, own)] * 2
