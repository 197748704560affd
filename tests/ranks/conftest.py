"""What files share, and the order in which workers of pytest-xdist take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

FIRST = (
    "test_pairs_of_features.py", "test_experts.py", "test_generate.py", "test_replica_sums.py",
    "test_mesh_does_not_change_numbers.py", "test_context_parallel.py", "test_recompute_and_compile.py",
    "test_optimizer_offload.py", "test_quantised_base.py", "test_eval_command.py", "test_templates_train.py",
    "test_low_memory.py", "test_wheel.py", "test_forked_workers.py", "test_lora.py", "test_adapter_dropout.py",
    "test_lora_in_less_memory.py", "test_no_host_sync.py", "test_trackers.py", "test_strangers.py",
    "test_waiting_for_all_posted.py", "test_families_on_meshes.py", "test_model_family_recipe.py",
    "test_mesh_on_one_device.py", "test_evaluation.py", "test_measured_costs.py", "test_data_tokenize.py",
)  # fmt: skip
"""The slowest files. If they started last, all other cores would wait for them."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Returns losses and final state of `test_memory_tier.py`'s job, run without that tier."""
    from local_run import LocalRun
    from test_memory_tier import STEPS, document

    root = tmp_path_factory.mktemp("undisturbed")
    run = LocalRun(document(memory_tier=False), root, [root, root], [0, 0])
    attempt = run.attempt_once()
    assert sorted(attempt.losses) == list(range(1, STEPS + 1)), attempt
    return attempt.losses, run.final_state()
