"""CONTRIBUTING's recipes work on real ranks: the example kinds train, and rank tests cover them."""

import json
from pathlib import Path

import pytest
from recipes import SCHEDULE, job_text, python_in, tree_with

CONTRACTS = (
    "tests/unit/schedules",
    "tests/unit/planning/test_make_plan.py",
    "tests/unit/data/test_every_source.py",
    "tests/unit/storage/test_every_store.py",
    "tests/ranks/test_mesh_does_not_change_numbers.py",
    "tests/ranks/test_optimizers.py",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree_with(tmp_path_factory.mktemp("recipes"))


def train(place: Path, *settings: str) -> str:
    overrides = [word for setting in settings for word in ("--set", setting)]
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "raypp.rank")
    done = python_in(place, *ranks, "--job", "job.yaml", *overrides, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.gate
def test_two_ranks_train_with_a_new_schedule_source_store_and_optimizer(tree: Path) -> None:
    (tree / "job.yaml").write_text(job_text(tree))
    train(tree)
    commit = json.loads((tree / "shelf/recipes/step-00000003/COMMIT").read_text())
    assert commit["step"] == 3


@pytest.mark.slow
def test_the_contract_tests_take_up_new_kinds_the_day_they_appear(tree: Path) -> None:
    done = python_in(
        tree, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-m", "not slow",
        "-k", "(pairs or lines or shelf or (signs and under_a_pipeline)) and not sharded", *CONTRACTS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    for test in (
        "test_every_program_is_valid_and_runs[pairs]",
        "test_what_a_schedule_says_of_itself_is_so[pairs]",
        "test_no_schedule_hangs_at_any_lookahead_on_few_ranks[pairs]",
        "test_every_schedule_can_be_planned[pairs]",
        "test_a_pipeline_gives_losses_gradients_and_weights_of_one_process_bit_for_bit[pairs-2-1]",
        "test_a_pipeline_gives_losses_gradients_and_weights_of_one_process_bit_for_bit[pairs-3-1]",
        "test_documents_are_ids_of_the_model_and_the_same_every_time[lines]",
        "test_a_loader_goes_on_where_another_was[lines]",
        "TestEveryStoreOfFiles::test_of_eight_writers_racing_for_one_key_exactly_one_wins[shelf]",
        "TestEveryStoreOfFiles::test_probe_leaves_nothing_behind[shelf]",
        "test_under_a_pipeline_every_weight_has_the_bits_of_one_process[signs]",
    ):
        assert f"{test}\n" in done.stdout, done.stdout[-5000:]


@pytest.mark.slow
def test_two_ranks_train_with_a_schedule_of_ones_own_module(tmp_path: Path) -> None:
    (tmp_path / "my_orders.py").write_text(SCHEDULE)
    (tmp_path / "job.yaml").write_text(job_text(tmp_path, schedule="my_orders:build", data="text", optimizer="adamw"))
    train(tmp_path, f"checkpoint.url={tmp_path}/store")
    assert (tmp_path / "store/recipes/step-00000003/COMMIT").exists()
