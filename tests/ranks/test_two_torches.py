"""Two releases of torch give the same numbers, and each loads the other's checkpoints.

`make test-torch211` runs these tests with the oldest supported torch; the other one is the pinned
torch.
"""

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import WIDE, assert_close, assert_identical, assert_tensors_close
from harness import run_in_turn
from other_torch import needs_other_torch, run_in_turn_with_other_torch
from test_checkpoint_recut import merged as merged_state
from test_checkpoint_recut import rank_life, world_of
from test_experts import document as experts
from test_recut_of_runs import live
from training import document, merged, train_steps

from raypp.planning.schedules.catalogue import SCHEDULES

# The first test waits for the numbers of all jobs with both torches.
pytestmark = [pytest.mark.timeout(900), needs_other_torch]
STEPS = 3
LIST = Path(__file__).parents[1] / "lint/names_since_torch_2_11.txt"
LOSS = 1e-6
"""Bound on the relative error of a loss in fp32 where the kernels of the two differ."""
Run = Callable[..., list[list[Any]]]
BOTH: dict[str, Run] = {"this": run_in_turn, "other": run_in_turn_with_other_torch}


def job(**settings: Any) -> dict[str, Any]:
    return document(microbatches=4, **settings)


def adapters(base: str, dropout: float) -> dict[str, Any]:
    lora = {"rank": 4, "base": base, "dropout": dropout}
    return job(pp=2, model={"hidden_size": 64, "ffn_size": 128, "lora": lora})


KERNELS = {"one process": job(), "one process, experts": experts()}
"""Jobs without messages: only torch's kernels can change their numbers."""
MESHES = {
    **{
        f"pp 2, {kind.name}": job(pp=2, schedule=kind.name, pipeline={"stages_per_rank": kind.nearest_stages(2)})
        for kind in SCHEDULES
    },
    "fsdp 2": job(fsdp=2),
    "dp_replicate 2": job(dp_replicate=2),
    "cp 2, ring": job(cp=2, cp_style="ring"),
    "cp 2, ulysses": job(cp=2, cp_style="ulysses"),
    "ep 2": experts(mesh={"fsdp": 2, "ep": 2}),
    "pp 2, tied": job(pp=2, model={"tie_embeddings": True}),
    "pp 2, adapters with dropout": adapters("fp32", 0.2),
    "pp 2, adapters on nf4": adapters("nf4", 0.0),
    "pp 2, selective recomputation": job(pp=2, train={"activation_checkpointing": "selective"}),
    "pp 2, full recomputation": job(pp=2, train={"activation_checkpointing": "full"}),
}
TYPES = (torch.float32, torch.float64)


@pytest.fixture(scope="module")
def numbers() -> dict[str, dict[tuple[str, torch.dtype], dict[str, Any]]]:
    """Trains every job with each torch. Returns the numbers by torch, job and type."""
    return {name: trained(run) for name, run in BOTH.items()}


def trained(run: Run) -> dict[tuple[str, torch.dtype], dict[str, Any]]:
    found = {}
    for world, jobs in ((1, KERNELS), (2, MESHES)):
        cases = [(source, STEPS, "cpu", (), dtype) for source in jobs.values() for dtype in TYPES]
        results = iter(run(world, train_steps, cases))
        found |= {(name, dtype): merged(next(results)) for name in jobs for dtype in TYPES}
    return found


@pytest.mark.parametrize("name", [*KERNELS, *MESHES])
def test_losses_are_the_same_and_gradients_and_weights_in_fp64(name: str, numbers: Any) -> None:
    this, other = (numbers[torch_][name, torch.float64] for torch_ in BOTH)
    assert_close(this, other, WIDE)
    assert_tensors_close(this["weights"], other["weights"], WIDE)
    this, other = (numbers[torch_][name, torch.float32] for torch_ in BOTH)
    assert this["loss"] == pytest.approx(other["loss"], rel=LOSS, abs=0)


def same_kernels(numbers: Any) -> bool:
    try:
        for name in KERNELS:
            assert_identical(*(numbers[torch_][name, torch.float32] for torch_ in BOTH))
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", MESHES)
def test_where_both_have_the_same_kernels_a_mesh_gives_the_same_bits(name: str, numbers: Any) -> None:
    if not same_kernels(numbers):
        pytest.skip("one process gives other bits: the kernels of the two differ on this CPU")
    assert_identical(*(numbers[torch_][name, torch.float32] for torch_ in BOTH))


# Checkpoints. A direction names the torch that saves.


@pytest.mark.parametrize(("first", "second"), [("this", "other"), ("other", "this")])
@pytest.mark.parametrize("sizes", [((2, 1, 1), (1, 1, 2)), ((1, 1, 2), (1, 1, 1))], ids=str)
def test_what_one_torch_saved_the_other_loads_bit_for_bit(
    first: str, second: str, sizes: tuple[Any, Any], tmp_path: Path
) -> None:
    states = []
    for torch_, mesh, save in ((first, sizes[0], True), (second, sizes[1], False)):
        (results,) = BOTH[torch_](world_of(mesh), rank_life, [(mesh, str(tmp_path), save)])
        assert [result["step"] for result in results] == [2] * len(results)
        states.append(merged_state(results))
    saved, loaded = states
    assert saved and saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


@pytest.mark.parametrize(("first", "second"), [("this", "other"), ("other", "this")])
def test_a_run_resumes_with_the_other_torch(first: str, second: str, tmp_path: Path) -> None:
    def steps(torch_: str, folder: str, number: int, attempt: int) -> Any:
        source = job(pp=2, checkpoint={"url": str(tmp_path / folder), "every_steps": 0, "memory_tier": False})
        source["train"] |= {"steps": number, "lr_schedule": {"kind": "constant", "warmup_steps": 1}}
        ((result, _),) = BOTH[torch_](2, live, [(source, attempt)])
        assert result["committed"] == number
        return result

    steps(first, "changed", 2, 1)
    resumed, whole = steps(second, "changed", 4, 2), steps(first, "whole", 4, 1)
    assert "resumed" in resumed["kinds"]
    found, expected = ({step: rest for step, *rest in result["numbers"]} for result in (resumed, whole))
    for step in (3, 4):
        (loss, norm, tokens), (expected_loss, expected_norm, expected_tokens) = found[step], expected[step]
        assert tokens == expected_tokens
        assert loss == pytest.approx(expected_loss, rel=LOSS) and norm == pytest.approx(expected_norm, rel=1e-5)


# Names.


MODULES = [
    "torch", "torch.accelerator", "torch.autograd", "torch.autograd.graph", "torch.compiler", "torch.cuda",
    "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor", "torch.library", "torch.nn.attention", "torch.nn.attention.flex_attention",
    "torch.nn.attention.varlen", "torch.nn.functional", "torch.nn.utils", "torch.optim", "torch.profiler",
    "torch.utils.checkpoint",
]  # fmt: skip


def surface(rank: int, world: int, port: int) -> tuple[str, dict[str, set[str]]]:
    """Returns what this process's torch has. Takes a rank's arguments, for `run_in_turn`.

    Returns:
        torch's version; and by dotted name of a function, class or value: `(p)` for each parameter
        `p`, `.m` for each member `m` of a class.
    """
    with warnings.catch_warnings(action="ignore"):  # deprecated names warn when they are looked at
        return torch.__version__, {name: set(_parts(value)) for module in MODULES for name, value in _public(module)}


def added(old: dict[str, set[str]], new: dict[str, set[str]]) -> list[str]:
    """Returns what only the new release has, sorted: `torch.f`, `torch.f(p)` for a parameter of
    what both have, and `.m_n` for a member that no class of the old one has. Members of one word
    (`.out`) are left out: a source does not tell whose they are."""
    members = set().union(*old.values())
    parts = {(name, part) for name in new.keys() & old.keys() for part in new[name] - old[name]}
    parameters = {name + part for name, part in parts if part.startswith("(")}
    telling = {part for _, part in parts if part.startswith(".") and "_" in part} - members
    return sorted({*(new.keys() - old.keys()), *parameters, *telling})


def _public(module: str) -> Iterator[tuple[str, Any]]:
    for name, value in vars(importlib.import_module(module)).items():
        is_torchs = str(getattr(value, "__module__", module)).startswith("torch")
        # NCCL's names are those of a CUDA build.
        if is_torchs and not name.startswith("_") and "NCCL" not in name and not inspect.ismodule(value):
            yield f"{module}.{name}", value


def _parts(value: Any) -> Iterator[str]:
    with contextlib.suppress(TypeError, ValueError):  # no function, or one in C++
        yield from (f"({name})" for name in inspect.signature(value).parameters)
    if inspect.isclass(value):
        yield from (f".{name}" for name in dir(value) if not name.startswith("_"))


def test_the_list_of_names_that_the_older_one_lacks_is_complete() -> None:
    """`tests/lint/test_oldest_torch.py` uses the list."""
    found = {}
    for run in BOTH.values():
        (((version, names),),) = run(1, surface, [()])
        found[version] = names
    old, new = sorted(found, key=lambda version: [int(part) for part in version.split(".")[:2]])
    assert LIST.read_text().split() == added(found[old], found[new])
