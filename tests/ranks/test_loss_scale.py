"""fp16: scales, skipped steps and weights are those of torch's GradScaler; no mesh changes them."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_identical
from local_run import LocalRun, same
from training import document, thinned, trained

from raypp.job.load import parse_job
from raypp.rank.build import draw_weights
from raypp.rank.data.loader import open_loader
from raypp.rank.step.collate import collate, labelled_tokens, longest_row
from raypp.stages.models.loss import token_loss_sum
from raypp.stages.models.stage import build_stage
from raypp.stages.parallel.context import WholeRows
from raypp.stages.pipeline.agreement import padded_length
from raypp.tools.parity import relative_error

STEPS = 8
TRAIN = {
    "steps": STEPS, "precision": "fp16", "loss_scale": {"init": 2**21, "growth_interval": 2},
    "optimizer": {"kind": "adamw", "lr": 3e-3, "weight_decay": 0},
}  # fmt: skip
"""Overflows at first, and again each time that the scale has grown back."""


def fp16(*, microbatches: int = 4, **sections: Any) -> dict[str, Any]:
    return document(layers=4, microbatches=microbatches, train=TRAIN, **sections)


def with_grad_scaler(source: dict[str, Any]) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Returns the losses, the scales and the last weights of a plain loop over one module."""
    job = parse_job(source)
    model = build_stage(job.model, range(job.model.num_layers), first=True, last=True).to_empty(device="cpu")
    draw_weights([model], job)
    half = copy.deepcopy(model).half()
    losses: list[float] = []
    scales: list[float] = []
    options = job.train.loss_scale
    assert options.growth_interval is not None
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)
    scaler = torch.amp.GradScaler("cpu", options.init, growth_interval=options.growth_interval)
    loader, full = open_loader(job, 0, 1), job.train.micro_batch_size * job.data.seq_len
    for step in range(1, STEPS + 1):
        microbatches, total = [tuple(one.rows) for one in loader.next_step()], 0.0
        tokens = sum(map(labelled_tokens, microbatches))
        for rows in microbatches:
            batch = collate(rows, padded_length(longest_row(rows), multiple=8), WholeRows())
            for narrow, weight in zip(half.parameters(), model.parameters(), strict=True):
                narrow.data.copy_(weight.data)
            loss = token_loss_sum(half(batch.tokens_BT, **batch.stage_arguments()), batch.labels_BT)
            scaler.scale(loss / full).backward()
            total += float(loss.detach())
            for narrow, weight in zip(half.parameters(), model.parameters(), strict=True):
                weight.grad = narrow.grad.float() if weight.grad is None else weight.grad.add_(narrow.grad)
                narrow.grad = None
        losses.append(total / tokens)
        scales.append(scaler.get_scale())
        scaler.unscale_(optimizer)
        for weight in model.parameters():
            assert weight.grad is not None
            weight.grad *= full / tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.train.clip_norm or 0.0)
        optimizer.param_groups[0]["lr"] = job.train.learning_rate(step)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    loader.close()
    return losses, scales, {name: weight.detach() for name, weight in model.named_parameters()}


def test_scales_and_skipped_steps_are_those_of_torch() -> None:
    found = trained(fp16(), STEPS)
    losses, scales, weights = with_grad_scaler(fp16())
    assert [one["loss_scale"] for one in found["extras"]] == scales
    lowered = [after < before for before, after in pairwise(scales)]
    assert lowered[0] and any(lowered[3:]) and not all(lowered), "the scale does not fall, grow and fall"
    assert found["extras"][-1]["overflows"] in (sum(lowered), sum(lowered) + 1)
    assert len(found["gradients"]) == STEPS - found["extras"][-1]["overflows"], "a step that overflowed updated weights"
    assert found["loss"] == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        assert relative_error(found["weights"][name], value) <= 1e-4, name


MESHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pp": ({"pp": 2}, {}),
    "split": ({"pp": 2, "schedule": "interleaved_zero_bubble", "pipeline": {"stages_per_rank": 2}}, {}),
    "replicas": ({"pp": 2, "dp_replicate": 2}, {"dp_replicate": 2}),
    "fsdp": ({"pp": 2, "fsdp": 2}, {"fsdp": 2}),
    "cp": ({"pp": 2, "cp": 2}, {"cp": 2}),
}
"""Each with the mesh of one stage that adds the same numbers in the same order."""


@pytest.mark.parametrize("mesh", thinned(MESHES, ["split"], ["fsdp"]))
def test_no_cut_changes_a_bit_or_a_scale(mesh: str) -> None:
    found, reference = (trained(fp16(microbatches=8, **on), STEPS) for on in MESHES[mesh])
    assert_identical(found, reference)
    assert 0 < len(found["gradients"]) < STEPS


@pytest.mark.slow
@pytest.mark.gate
def test_a_restart_and_another_mesh_go_on_with_the_scale(tmp_path: Path) -> None:
    finals: list[dict[str, torch.Tensor]] = []
    told: list[Any] = []
    for place, mesh, faults in (("one", {}, ""), ("again", {"pp": 2}, "raise@forward:rank=0,step=7")):
        source = fp16(name="faulty", checkpoint={"every_steps": 3, "memory_tier": False}, **mesh)
        root, ranks = tmp_path / place, mesh.get("pp", 1)
        run = LocalRun(source, root, [root] * ranks, [0] * ranks, {"RAYPP_FAULTS": faults} if faults else None)
        reported = run.attempt_once()
        if faults:
            assert reported.errors
            reported = run.attempt_once()
        finals.append(run.final_state())
        told.append([(one.step, one.message) for one in reported.of_kind("loss_scale") if one.step > 6])
    assert same(*finals) and told[0] == told[1]


def test_an_overflow_with_the_least_scale_is_an_error(tmp_path: Path) -> None:
    source = fp16(name="faulty", checkpoint={"memory_tier": False})
    source["train"] = TRAIN | {"loss_scale": {"init": 1}}
    reported = LocalRun(
        source, tmp_path, [tmp_path], [0], {"RAYPP_FAULTS": "nan@backward:rank=0,step=2"}
    ).attempt_once()
    assert reported.errors[0].startswith("NonFiniteError: step 2: the gradients of "), reported.errors
    assert "although the loss scale is the least, 1; it did not recur" in reported.errors[0]
