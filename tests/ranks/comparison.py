"""Compares the numbers of two trainings: bit for bit, or by the contributions that are summed.

A mesh that splits a step's tokens over ranks adds the same contributions in another order. In fp32
the order alone causes a relative error of up to 6e-7 in a gradient of the first step. AdamW then
divides every gradient by its own size, so where a gradient is nearly 0 a rounding changes the
length of the update. Two steps later the error is up to 2e-5, and its size depends on the CPU's
kernels. A bound on that error either fails by chance or hides a fault.

So sums are compared in fp64, where the same roundings stay at 1e-14 after the same updates.
"""

from typing import Any

import pytest
import torch
from training import Numbers

from raypp.tools.parity import relative_error

WIDE = 1e-10
"""Bound on the relative error in fp64 after the steps of a test. Rounding is at most 1e-14, with
AVX-512, with AVX2 and without vector kernels. A contribution with a relative error of 1e-6 shows as
about 1e-7."""
FIRST_STEP = 1e-5
"""Bound on the relative error in fp32 before any update, so AdamW has not amplified it. Rounding is
at most 6e-7. This finds faults specific to fp32, such as a buffer of the wrong size. fp64 checks
what is added."""


def assert_identical(found: dict[str, Any], reference: dict[str, Any]) -> None:
    """Asserts that every number of every step has the same bits."""
    assert found["loss"] == reference["loss"]
    assert found["tokens"] == reference["tokens"]
    assert found["grad_norm"] == reference["grad_norm"]
    assert found["extras"] == reference["extras"]
    assert found["flops"] == reference["flops"]
    for step, (ours, theirs) in enumerate(zip(found["gradients"], reference["gradients"], strict=True)):
        assert ours.keys() == theirs.keys()
        differing = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert not differing, f"step {step + 1}: gradients differ: {differing}"
    assert all(torch.equal(found["weights"][name], value) for name, value in reference["weights"].items())


def assert_same_sums(found: Numbers, reference: Numbers) -> None:
    """Asserts that the same contributions were added, in any order: all steps and the weights in
    fp64, one step in fp32."""
    for result in (found, reference):
        assert {value.dtype for value in result.wide["weights"].values()} == {torch.float64}
        assert {value.dtype for value in result.first["weights"].values()} == {torch.float32}
        assert len(result.first["loss"]) == 1
    assert_close(found.wide, reference.wide, WIDE)
    assert_tensors_close(found.wide["weights"], reference.wide["weights"], WIDE)
    assert_close(found.first, reference.first, FIRST_STEP)


def assert_close(found: dict[str, Any], reference: dict[str, Any], relative: float) -> None:
    """Asserts that losses, norms and gradients of every step are within a relative error. Gradients
    are compared by their 2-norm."""
    assert found["tokens"] == reference["tokens"]
    assert found["flops"] == pytest.approx(reference["flops"], rel=1e-12)
    assert found["loss"] == pytest.approx(reference["loss"], rel=relative, abs=0)
    assert found["grad_norm"] == pytest.approx(reference["grad_norm"], rel=relative, abs=0)
    for ours, theirs in zip(found["extras"], reference["extras"], strict=True):
        assert ours == pytest.approx(theirs, rel=relative, abs=0)
    for step, (ours, theirs) in enumerate(zip(found["gradients"], reference["gradients"], strict=True)):
        assert_tensors_close(ours, theirs, relative, f"step {step + 1}: ")


def assert_tensors_close(
    found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], relative: float, where: str = ""
) -> None:
    """Asserts the same names, and each tensor within a relative error by its 2-norm."""
    assert found.keys() == reference.keys()
    for name, value in reference.items():
        assert found[name].shape == value.shape, f"{where}{name}"
        error = relative_error(found[name], value)
        assert error <= relative, f"{where}{name}: {error:.1e}"
