"""Tensor parallelism adds up what one process does."""

from __future__ import annotations

from typing import Any

import pytest
from comparison import assert_same_sums
from small_models import small_options
from training import document, numbers

STEPS = 2


def job(kind: str = "llama", changes: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    options = small_options(kind, num_layers=4).model_dump(mode="json", exclude_none=True)
    return {**document(microbatches=4, **sections), "model": options | (changes or {})}


@pytest.mark.parametrize("mesh", [{"tp": 2}])
def test_it(mesh: dict[str, Any]) -> None:
    assert_same_sums(numbers(job(**mesh), STEPS), numbers(job(), STEPS))
