"""Sets the order in which workers of pytest-xdist take the files of this tier
(`--dist loadfile --no-loadscope-reorder`)."""

from __future__ import annotations

import pytest

FIRST = (
    "test_pairs_of_features.py",
    "test_experts.py",
    "test_generate.py",
    "test_replica_sums.py",
    "test_mesh_does_not_change_numbers.py",
    "test_context_parallel.py",
    "test_recompute_and_compile.py",
    "test_optimizer_offload.py",
    "test_quantised_base.py",
    "test_eval_command.py",
    "test_templates_train.py",
    "test_low_memory.py",
    "test_wheel.py",
    "test_forked_workers.py",
    "test_lora.py",
    "test_adapter_dropout.py",
    "test_lora_in_less_memory.py",
    "test_no_host_sync.py",
    "test_trackers.py",
    "test_strangers.py",
    "test_waiting_for_all_posted.py",
    "test_families_on_meshes.py",
    "test_model_family_recipe.py",
    "test_mesh_on_one_device.py",
    "test_evaluation.py",
    "test_measured_costs.py",
    "test_data_tokenize.py",
)
"""The slowest files. If they started last, all other cores would wait for them."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
