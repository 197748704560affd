"""Tests the same numerics on CUDA and NCCL: `pytest tests/gpu`, on all devices of the machine.

Needs neither Ray nor S3. With one device the mesh has one rank. With more devices, the tests cover
pipelines and FSDP across them.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from harness import run_ranks
from training import document, merged, train_steps

pytestmark = pytest.mark.gpu

STEPS = 3


def run(device: str, precision: str = "fp32", **mesh: int) -> dict[str, Any]:
    model = {"hidden_size": 128, "head_dim": 32, "ffn_size": 256, "vocab_size": 320}
    data = {"kind": "synthetic", "num_documents": 400, "document_len": [3, 90], "seq_len": 128}
    train = {"precision": precision, "compile": False}
    job = document(model=model, data=data, train=train, **mesh)
    return merged(run_ranks(prod(mesh.values()), train_steps, job, STEPS, device))


def relative(found: torch.Tensor, reference: torch.Tensor) -> float:
    return float((found - reference).norm() / reference.norm())


def test_fp32_on_one_device_gives_the_numbers_of_the_cpu() -> None:
    cpu, cuda = run("cpu"), run("cuda")
    assert cuda["tokens"] == cpu["tokens"]
    # Sums are in another order. The first steps of AdamW amplify the rounding of small gradients,
    # and there are three steps.
    assert cuda["loss"] == pytest.approx(cpu["loss"], rel=1e-5)
    for name, value in cpu["gradients"][0].items():
        assert relative(cuda["gradients"][0][name], value) < 1e-4, name


def test_bf16_uses_the_variable_length_kernel_and_stays_near_fp32() -> None:
    fp32, bf16 = run("cuda"), run("cuda", "bf16")
    # bf16 has 8 bits: each activation is off by 2^-9, the loss by far less.
    assert bf16["loss"] == pytest.approx(fp32["loss"], rel=1e-2)


def assert_same_losses(found: list[float], reference: list[float]) -> None:
    """Of the first step within 1e-6. Then the kernels' atomic sums of gradients, whose order
    differs, have gone through updates, and AdamW's first ones turn small differences into large
    ones."""
    assert found[0] == pytest.approx(reference[0], rel=1e-6)
    assert found == pytest.approx(reference, rel=1e-4)


def test_two_runs_on_one_device_give_the_same_losses() -> None:
    assert_same_losses(run("cuda", "bf16")["loss"], run("cuda", "bf16")["loss"])


@pytest.mark.parametrize(
    ("mesh", "precision"),
    [({"pp": 2}, "fp32"), ({"pp": 2}, "bf16"), ({"fsdp": 2}, "fp32"), ({"pp": 2, "fsdp": 2}, "fp32")],
    ids=str,
)
def test_a_mesh_over_nccl_gives_the_losses_of_one_device(mesh: dict[str, int], precision: str) -> None:
    if torch.cuda.device_count() < prod(mesh.values()):
        pytest.skip(f"needs {prod(mesh.values())} CUDA devices, this machine has {torch.cuda.device_count()}")
    one, several = run("cuda", precision), run("cuda", precision, **mesh)
    if "fsdp" in mesh:
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-5)
    else:
        assert_same_losses(several["loss"], one["loss"])
        assert several["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5 if precision == "fp32" else 1e-3)
