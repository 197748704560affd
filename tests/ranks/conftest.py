"""Sets the order in which workers of pytest-xdist take the files of this tier
(`--dist loadfile --no-loadscope-reorder`)."""

from __future__ import annotations

import pytest

FIRST = (
    "test_lora.py",
    "test_recompute_and_compile.py",
    "test_experts.py",
    "test_optimizer_offload.py",
    "test_templates_train.py",
    "test_low_memory.py",
    "test_mesh_does_not_change_numbers.py",
    "test_quantised_base.py",
    "test_context_parallel.py",
    "test_model_family_recipe.py",
)
"""The slowest files. If they started last, all other cores would wait for them."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
