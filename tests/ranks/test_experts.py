"""Neither the mesh nor the placement of experts changes the numbers. The reference is one process.

If two experts are equally likely for a token to within a rounding, the token's choice can flip, and
then all numbers differ. The seeds here avoid that.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import assert_close, assert_identical, assert_same_sums
from harness import run_ranks
from test_optimizers import train_on
from training import document as small
from training import numbers, thinned, trained

from raypp.job.load import parse_job
from raypp.stages.models.experts import StackedExperts
from raypp.stages.parallel.expert import ExpertExchange
from raypp.state.checkpoint.commit import read_commit
from raypp.state.checkpoint.ranged_reads import open_files
from raypp.storage.directory import DirectoryStore

BLANK = (1,)
"""Microbatches without labels."""


def document(kind: str = "qwen3_moe", *, mesh: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """Returns a job with packed documents of 3 to 50 tokens, and gradients that are clipped."""
    model = {
        "kind": kind, "num_experts": 6, "experts_per_token": 2, "expert_ffn_size": 24, "aux_loss_weight": 0.02,
        "z_loss_weight": 0.01, **sections.pop("model", {}),
    }  # fmt: skip
    return small(name="experts", microbatches=4, model=model, **(mesh or {}), **sections)


@pytest.mark.slow
def test_a_pipeline_of_experts_with_a_blank_microbatch_gives_the_bits_of_one_process() -> None:
    found = trained(document(), blank=BLANK)
    assert min(found["grad_norm"]) > 0.05, "clipping is not active"
    for extras in found["extras"]:
        # Perfect balance gives experts_per_token. Six equal logits of nearly 0 give log(6) squared.
        assert 2 <= extras["aux_loss"] < 2.5 and extras["z_loss"] == pytest.approx(math.log(6) ** 2, rel=0.1)
    split = document(schedule="interleaved_zero_bubble", mesh={"pp": 2}, pipeline={"stages_per_rank": 2})
    assert_identical(trained(split, blank=BLANK), found)


MESHES = [
    {"fsdp": 2}, {"fsdp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"pp": 2, "fsdp": 2, "ep": 2}, {"fsdp": 4, "ep": 2},
    {"dp_replicate": 2, "fsdp": 2, "ep": 2}, {"fsdp": 2, "cp": 2, "ep": 2},
]  # fmt: skip


@pytest.mark.parametrize("mesh", thinned(MESHES, [], [{"cp": 2, "ep": 2}]), ids=str)
def test_experts_spread_over_ranks_add_up_what_one_process_does(mesh: dict[str, int]) -> None:
    assert_same_sums(numbers(document(mesh=mesh), blank=BLANK), numbers(document(), blank=BLANK))


@pytest.mark.slow
def test_three_ranks_hold_two_experts_each() -> None:
    job, alone = document(mesh={"cp": 3, "ep": 3}), document(pipeline={"pad_to_multiple_of": 24})
    assert_same_sums(numbers(job, 1, blank=BLANK), numbers(alone, 1, blank=BLANK))


def test_experts_that_no_token_chose_have_a_gradient_of_zero_on_every_mesh() -> None:
    few = {"model": {"num_experts": 32, "experts_per_token": 1, "num_layers": 2}, "train": {"micro_batch_size": 1}}
    short = {"kind": "synthetic", "num_documents": 40, "document_len": [3, 8], "seq_len": 8}
    reference = numbers({**document(**few), "data": short}, 1)
    spread = numbers({**document(mesh={"fsdp": 2, "ep": 2}, **few), "data": short}, 1)
    assert_same_sums(spread, reference)
    for ours, theirs in zip(spread, reference, strict=True):
        found = ours["gradients"][0]
        for name, value in theirs["gradients"][0].items():
            if ".experts." in name:
                assert [part.any() for part in value] == [part.any() for part in found[name]]
        gradient = theirs["gradients"][0]["model.layers.0.mlp.experts.up_proj"]
        assert any(not part.any() for part in gradient) and any(bool(part.any()) for part in gradient)


@pytest.mark.slow
def test_bf16_under_a_pipeline_is_exact_and_with_spread_experts_differs_by_bf16_roundings() -> None:
    meshes: tuple[dict[str, int], ...] = ({}, {"pp": 2}, {"fsdp": 2, "ep": 2})
    one, pipeline, spread = (
        trained(document(train={"precision": "bf16"}, mesh=mesh), 1, blank=BLANK) for mesh in meshes
    )
    assert_identical(pipeline, one)
    # An expert's gradient over the tokens of two ranks is rounded to bf16 (8 bits: 4e-3) once, not
    # once per rank. Measured: 1.8e-3. Later steps are not compared, because a rounding may send
    # tokens to other experts.
    assert_close(spread, one, 4e-3)


COUNTS = [
    [[3, 0, 2, 5], [1, 4, 0, 0]],
    [[0, 0, 2, 5], [0, 0, 0, 3]],  # the first rank's experts get nothing
    [[0, 0, 0, 0], [2, 1, 0, 3]],  # the first rank sends nothing
    [[0, 0, 0, 0], [0, 0, 0, 0]],
]


def four_experts() -> StackedExperts:
    experts = StackedExperts(4, 6, 10, ("gate_proj", "up_proj", "down_proj"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return experts


def rows_of(counts: list[int], rank: int) -> torch.Tensor:
    return torch.randn(sum(counts), 6, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def exchange_rows(rank: int, world: int, port: int) -> list[dict[str, Any]]:
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    exchange = ExpertExchange(dist.group.WORLD)
    results = []
    for counts in COUNTS:
        experts, everywhere = StackedExperts(2, 6, 10, ("gate_proj", "up_proj", "down_proj")), four_experts()
        with torch.no_grad():
            for name, parameter in experts.named_parameters():
                parameter.copy_(getattr(everywhere, name)[2 * rank : 2 * rank + 2])
        rows = rows_of(counts[rank], rank)
        out = exchange(torch.tensor(counts[rank]))(experts, rows)
        # The incoming gradient is not contiguous.
        (out.t() * torch.arange(6.0)[:, None]).sum().backward()
        gradients = {name: parameter.grad for name, parameter in experts.named_parameters()}
        results.append({"out": out.detach(), "rows": rows.grad, **gradients})
    dist.destroy_process_group()
    return results


def test_rows_find_their_experts_and_come_back_whatever_the_counts() -> None:
    found = run_ranks(2, exchange_rows)
    for case, counts in enumerate(COUNTS):
        experts = four_experts()
        for rank in range(2):
            rows = rows_of(counts[rank], rank)
            out = experts(rows, torch.tensor(counts[rank]))
            (out * torch.arange(6.0)).sum().backward()
            torch.testing.assert_close(found[rank][case]["out"], out.detach())
            torch.testing.assert_close(found[rank][case]["rows"], rows.grad)
        for name, parameter in experts.named_parameters():
            gathered = torch.cat([found[rank][case][name] for rank in range(2)])
            torch.testing.assert_close(gathered, parameter.grad)


MOVES = [
    ({"fsdp": 2, "ep": 2}, {}),
    ({}, {"cp": 2, "ep": 2}),
    ({"fsdp": 4, "ep": 2}, {"pp": 2}),
    ({"dp_replicate": 2, "fsdp": 2, "ep": 2}, {"fsdp": 2}),
]


@pytest.mark.parametrize(
    ("before", "after"),
    thinned(MOVES, MOVES[:1], MOVES[2:3]),
    ids=["ep 2 to one", "one to ep 2", "ep 2 of fsdp 4 to pp 2", "two replicas of ep 2 to fsdp 2"],
)
def test_a_checkpoint_of_spread_experts_loads_on_another_mesh_bit_for_bit(
    before: dict[str, int], after: dict[str, int], tmp_path: Path
) -> None:
    def everything(mesh: dict[str, int], steps: int) -> dict[str, torch.Tensor]:
        job = document(mesh=mesh, model={"num_layers": 2})
        results = run_ranks(parse_job(job).mesh.world, train_on, job, str(tmp_path), steps)
        return {name: value for r in results for part in ("weights", "state") for name, value in r[part].items()}

    saved, loaded = everything(before, 1), everything(after, 0)
    assert saved.keys() == loaded.keys()
    assert any(name.endswith("experts.up_proj/exp_avg") for name in saved)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    store = DirectoryStore(tmp_path)
    files = open_files(store, read_commit(store, "experts", 1))
    written = [entry for file in files for entry in file.header.entries if entry.name.endswith("1.mlp.experts.up_proj")]
    assert {tuple(entry.global_shape) for entry in written} == {(6, 24, 32)}
    written_once = sum(torch.Size(entry.shape).numel() for entry in written if not entry.name.startswith("optim/"))
    assert written_once == 6 * 24 * 32
