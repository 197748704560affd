"""Tests the same numerics on CUDA and NCCL: `pytest tests/gpu`, on all devices of the machine.

Needs neither Ray nor S3. With one device the mesh has one rank. With more devices, the tests cover
pipelines and FSDP across them.
"""

from typing import Any

import pytest
import torch
from harness import run_ranks
from training import merged, train_steps

from raypp.job.precision import GROUPS_FP8, SINCE_FP8
from raypp.stages.models.fp8 import Fp8Matrix
from raypp.stages.models.initial_values import Law
from raypp.stages.models.quantised_rows import quantise_rows

pytestmark = pytest.mark.gpu

STEPS = 3


def document(*, pp: int = 1, fsdp: int = 1, precision: str = "fp32", head_dim: int = 32) -> dict[str, Any]:
    return {
        "name": "numbers-on-cuda",
        "model": {
            "kind": "llama", "num_layers": 4, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2,
            "head_dim": head_dim, "ffn_size": 256, "vocab_size": 320,
        },
        "data": {"kind": "synthetic", "num_documents": 400, "document_len": [3, 90], "seq_len": 128},
        "mesh": {"pp": pp, "fsdp": fsdp},
        "pipeline": {"microbatches": 8 // fsdp},
        "train": {"steps": STEPS, "seed": 3, "clip_norm": 0.05, "precision": precision, "compile": False},
    }  # fmt: skip


def run(device: str, **mesh: Any) -> dict[str, Any]:
    job = document(**mesh)
    world = job["mesh"]["pp"] * job["mesh"]["fsdp"]
    return merged(run_ranks(world, train_steps, job, STEPS, device))


def relative(found: torch.Tensor, reference: torch.Tensor) -> float:
    return float((found - reference).norm() / reference.norm())


def needs(devices: int) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices, this machine has {torch.cuda.device_count()}")


@pytest.mark.parametrize("base", ["int8", "nf4", "fp8"])
def test_a_card_draws_and_quantises_the_bits_of_the_cpu(base: Any) -> None:
    rows_R, places = torch.tensor([0, 7, 1 << 33]), {}
    for device in ("cpu", "cuda"):
        drawn = [Law(kind, 0.02).draw(rows_R.to(device), 320, 42) for kind in ("normal", "uniform")]
        places[device] = [*drawn, *(quantise_rows(rows, base) for rows in drawn)]
    assert all(torch.equal(a, b.cpu()) for a, b in zip(places["cpu"], places["cuda"], strict=True))


def test_fp32_on_one_device_gives_the_numbers_of_the_cpu() -> None:
    cpu, cuda = run("cpu"), run("cuda")
    assert cuda["tokens"] == cpu["tokens"]
    # Sums are in another order. The first steps of AdamW amplify the rounding of small gradients,
    # and there are three steps.
    assert cuda["loss"] == pytest.approx(cpu["loss"], rel=1e-5)
    for name, value in cpu["gradients"][0].items():
        assert relative(cuda["gradients"][0][name], value) < 1e-4, name


def test_bf16_uses_the_variable_length_kernel_and_stays_near_fp32() -> None:
    fp32, bf16 = run("cuda"), run("cuda", precision="bf16")
    # bf16 has 8 bits: each activation is off by 2^-9, the loss by far less.
    assert bf16["loss"] == pytest.approx(fp32["loss"], rel=1e-2)


def test_products_in_fp8_are_those_of_the_cpu() -> None:
    if torch.cuda.get_device_capability() < SINCE_FP8:
        pytest.skip("this card has no products in fp8")
    x, weight, grad = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((96, 256), (128, 256), (96, 128)))
    found = []
    for device in ("cpu", "cuda"):
        inputs, matrix = (one.to(device, copy=True).requires_grad_() for one in (x, weight))
        fp8 = Fp8Matrix(matrix, kept=True)
        fp8.take(matrix)
        out = fp8(inputs, matrix)
        out.backward(grad.to(device))
        found.append([fp8.rows.view(torch.uint8), fp8.scales, out, inputs.grad, matrix.grad])
    for number, (ours, theirs) in enumerate(zip(*found, strict=True)):
        if number < 2:
            assert torch.equal(ours, theirs.cpu())
        assert relative(theirs.cpu().float(), ours.float()) < 4e-3, number  # sums in another order, rounded to bf16
    cpu, cuda = (run(device, precision="fp8") for device in ("cpu", "cuda"))
    assert cuda["loss"] == pytest.approx(cpu["loss"], rel=1e-2)


def test_experts_in_fp8_are_those_of_the_cpu() -> None:
    if torch.cuda.get_device_capability() != GROUPS_FP8:
        pytest.skip("torch has no products in fp8 of all experts for this card")
    x, weight, grad = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((96, 256), (4, 128, 256), (96, 128)))
    found = []
    for device in ("cpu", "cuda"):
        inputs, matrices = (one.to(device, copy=True).requires_grad_() for one in (x, weight))
        ends = torch.tensor([40, 40, 90, 96], dtype=torch.int32, device=device)
        out = Fp8Matrix(matrices, kept=True).stack(matrices).product(inputs, ends)
        out.backward(grad.to(device))
        found.append([out, inputs.grad, matrices.grad])
    for number, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert relative(theirs.cpu().float(), ours.float()) < 4e-3, number


def assert_same_losses(found: list[float], reference: list[float]) -> None:
    """Of the first step within 1e-6. Then the kernels' atomic sums of gradients, whose order
    differs, have gone through updates, and AdamW's first ones turn small differences into large
    ones."""
    assert found[0] == pytest.approx(reference[0], rel=1e-6)
    assert found == pytest.approx(reference, rel=1e-4)


def test_two_runs_on_one_device_give_the_same_losses() -> None:
    assert_same_losses(run("cuda", precision="bf16")["loss"], run("cuda", precision="bf16")["loss"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pipeline_over_nccl_gives_the_losses_of_one_device(precision: str) -> None:
    needs(2)
    one, two = run("cuda", precision=precision), run("cuda", pp=2, precision=precision)
    assert_same_losses(two["loss"], one["loss"])
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5 if precision == "fp32" else 1e-3)


def test_fsdp_over_nccl_gives_the_losses_of_one_device() -> None:
    needs(2)
    assert run("cuda", fsdp=2)["loss"] == pytest.approx(run("cuda")["loss"], rel=1e-5)


def test_pipeline_and_fsdp_over_four_devices_give_the_losses_of_one() -> None:
    needs(4)
    assert run("cuda", pp=2, fsdp=2)["loss"] == pytest.approx(run("cuda")["loss"], rel=1e-5)
