"""The kernel that torch.compile makes of the loss of a chunk: its numbers, and that it is one.

On CUDA, or by the same compiler's kernel for CPUs. How many kernels an H100 gets is planned without
a card.
"""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from ranks import DEVICE
from torch import Tensor

from raypp.stages.models import fused
from raypp.stages.models.loss import IGNORED, LossesAndErrors, for_chunks, losses_and_errors


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns logits `[s, V]` and labels `[s]`; V is no multiple of any block."""
    generator = torch.Generator().manual_seed(0)
    logits = (6 * torch.randn(600, 5003, generator=generator)).to(dtype)
    logits[3, :4000] = float("-inf")
    labels = torch.randint(4000, 5003, (600,), generator=generator)
    labels[:50:2] = IGNORED
    return logits.to(DEVICE), labels.to(DEVICE)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> LossesAndErrors:
    """What CUDA with Triton gets, compiled for this machine's device."""
    if DEVICE != "cuda" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile on CPU needs a C++ compiler")
    monkeypatch.setattr(fused, "kernels", lambda device: fused)
    for_chunks.cache_clear()
    found = for_chunks(torch.device(DEVICE))
    for_chunks.cache_clear()
    assert found is not losses_and_errors
    return found


@pytest.mark.parametrize(
    ("dtype", "cap"),
    [(torch.bfloat16, None), (torch.float32, 30.0), pytest.param(torch.float32, None, marks=pytest.mark.slow)],
)
def test_the_kernel_of_the_loss_is_as_exact_as_fp32(
    kernel: LossesAndErrors, dtype: torch.dtype, cap: float | None
) -> None:
    logits, labels = drawn(dtype)
    losses, errors = kernel(logits, labels, cap)
    assert (losses.dtype, errors.dtype) == (torch.float32, dtype)
    expected = losses_and_errors(logits.double(), labels, cap)
    # A sum of V terms has a relative error of at most V roundings, in any order. Each difference of
    # logits, up to `width`, is rounded a few times before exp makes a relative error of that; the
    # root of the soft cap's slope and the last operations add some more.
    finite = logits[logits.isfinite()].double()
    width = min(float(finite.max() - finite.min()), 2 * cap if cap else float("inf"))
    bound = (logits.shape[1] + 8 * width + 64) * 2.0**-24
    assert float((losses - expected[0]).abs().max()) <= bound
    rounding = torch.finfo(dtype).eps / 2 * expected[1].abs()
    assert bool(((errors - expected[1]).abs() <= bound + rounding).all())
    assert not losses[labels == IGNORED].any() and not errors[labels == IGNORED].any()


def test_a_row_of_the_kernel_of_the_loss_has_the_same_bits_beside_other_rows(kernel: LossesAndErrors) -> None:
    logits, labels = drawn(torch.bfloat16)
    whole = kernel(logits, labels, None)
    for rows in (slice(0, 300), slice(299, 600), slice(7, 16), slice(100, 597)):
        part = kernel(logits[rows], labels[rows], None)
        assert all(torch.equal(ours, theirs[rows]) for ours, theirs in zip(part, whole, strict=True))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_the_kernel_of_the_loss_hides_no_logit_that_is_not_finite(kernel: LossesAndErrors, value: str) -> None:
    logits, labels = drawn(torch.bfloat16)
    logits[1, 17] = float(value)
    losses, _ = kernel(logits, labels, None)
    assert not bool(losses[1].isfinite()) and int(losses.isfinite().sum()) == len(losses) - 1


@pytest.mark.skipif(
    torch.version.cuda is not None or torch.__version__ < "2.13", reason="planned by torch 2.13 for CPUs"
)
def test_the_loss_of_a_chunk_is_one_kernel_on_an_h100() -> None:
    # In a process of its own, because torch is changed there.
    found = subprocess.run([sys.executable, "-c", _PLANNED], check=True, capture_output=True, text=True).stdout
    for rows, ((moved,),) in zip((2048, 16), json.loads(found), strict=True):
        logits = 2 * rows * 128256
        assert 2 * logits <= moved <= 2.001 * logits


_PLANNED = """
import json, torch
from benchmarks.torch_private import kernels_on_cuda
from raypp.stages.models.loss import COMPILER_OPTIONS, losses_and_errors
from raypp.torch_private import fake_tensors, inductor_config

for name, value in COMPILER_OPTIONS.items():
    setattr(inductor_config(), name, value)

def kernels(rows):
    given = [torch.empty(rows, 128256, dtype=torch.bfloat16), torch.empty(rows, dtype=torch.int64)]
    return kernels_on_cuda(lambda *given: losses_and_errors(*given, None), given, fake)

with fake_tensors() as fake:
    print(json.dumps([kernels(2048), kernels(16)]))
"""
