"""The loss in chunks on this machine's device, and what a rank on CUDA sets for its process."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from ranks import DEVICE
from training import document

from raypp.job.load import parse_job
from raypp.planning import loss_memory
from raypp.planning.decide import decide
from raypp.planning.decision import Facts
from raypp.rank.assemble import assemble
from raypp.rank.own_seat import local_seat
from raypp.stages.models import loss
from raypp.stages.models.loss import IGNORED, Targets, in_chunks, loss_sum_in_chunks, token_loss_sum

TOKENS, WIDTH, VOCABULARY = 1000, 64, 40_000
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""On the relative error. Measured on CPUs: 3e-7 and 3e-3."""


@pytest.mark.parametrize(
    ("dtype", "backward_next"),
    [
        (torch.bfloat16, True),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
        pytest.param(torch.float32, False, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_loss_in_chunks_is_the_one_from_whole_logits(
    dtype: torch.dtype, backward_next: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CPU_BYTES", "CUDA_BYTES"):
        monkeypatch.setattr(loss_memory, name, 4 * VOCABULARY * 256)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, TOKENS, WIDTH, generator=generator).to(DEVICE, dtype).requires_grad_()
    weight = (0.3 * torch.randn(VOCABULARY, WIDTH, generator=generator)).to(DEVICE, dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    labels[0, :50] = IGNORED
    labels = labels.to(DEVICE)
    assert in_chunks(x, weight)
    losses = token_loss_sum(F.linear(x, weight), labels), loss_sum_in_chunks(x, weight, Targets(labels, backward_next))
    expected, found = ([loss.detach(), *torch.autograd.grad(loss, [x, weight])] for loss in losses)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.double() - theirs.double()).norm()) <= BOUNDS[dtype] * float(theirs.double().norm())


def settings(rank: int, world: int, port: int, train: dict[str, Any]) -> tuple[str, set[bool]]:
    """Returns the precision of products in fp32, and whether memory is in expandable segments."""
    job = parse_job(document(layers=1, train=train))
    with assemble(decide(job, Facts("cuda")), local_seat(rank, world, port, job, device="cuda"), hang_timeout_s=60):
        expandable = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
    return torch.get_float32_matmul_precision(), expandable


@pytest.mark.gpu
@pytest.mark.skipif("PYTORCH_ALLOC_CONF" in os.environ, reason="the user configures the allocator")
@pytest.mark.parametrize(("train", "precision"), [({}, "high"), ({"tf32": False}, "highest")], ids=str)
def test_a_rank_on_cuda_uses_expandable_segments_and_tf32(train: dict[str, Any], precision: str) -> None:
    assert run_ranks(1, settings, train) == [(precision, {True})]


@pytest.mark.gpu
def test_a_gradient_of_the_projection_is_summed_by_the_products_kernel() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert loss._adds_to_wide_sums(device, torch.bfloat16), "this torch or card does not: the sum is rounded twice"
    errors, x = (torch.randn(256, width, device=device).bfloat16() for width in (512, WIDTH))
    total = torch.full((512, WIDTH), 7.0, device=device)
    for first in (True, False):
        loss._add_product(total, errors, x, first=first)
    wanted = 2 * errors.double().t() @ x.double()
    assert (total.double() - wanted).norm() <= 1e-5 * wanted.norm()
