"""The kernels of flash-linear-attention give the numbers of the delta rule by torch's operators.

On a GPU; and without one by Triton's interpreter, where fla-core and Triton are installed.
"""

import builtins
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from raypp.job.layer_rules import DeltaRule
from raypp.job.load import parse_job
from raypp.stages.models.attention import PLAIN
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.fla_delta_rule import chunked
from raypp.stages.parallel import attention_choice
from raypp.stages.parallel.delta_rule_choice import try_delta_rule, with_delta_rule

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("fla", "triton")), reason="fla-core or Triton is not installed"
)
FLA = replace(PLAIN, delta=chunked)
SMALL, LARGE = DeltaRule(2, 4, 16, 32, 4), DeltaRule(1, 2, 128, 128, 4)
# Relative to the norm, of output and gradients. Here they are within 2e-6 and 7e-4.
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.mark.gpu
def test_a_card_chooses_it_and_then_never_waits() -> None:
    job = parse_job({"name": "a", "model": {"kind": "qwen3_5"}, "train": {"precision": "bf16"}})
    device = torch.device("cuda", 0)
    choice = with_delta_rule(attention_choice.choose_attention(job, device), job, device)
    assert choice.kernel.delta is chunked, str(choice)
    documents = PackedDocuments.of_lengths((5, 70)).moved(lambda t: t.to(device))
    q, k, v = (torch.randn(75, heads, 128, device=device, dtype=torch.bfloat16) for heads in (1, 1, 2))
    rest = -torch.rand(75, 2, device=device), torch.rand(75, 2, device=device).bfloat16()
    chunked(documents, q, k, v, *rest)  # measures its tiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunked(documents, q, k, v, *rest)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_interpreter_gives_the_numbers_of_torchs_operators(tmp_path: Path) -> None:
    # In a process of its own: Triton reads its settings when it is imported.
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    settings = {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "FLA_CACHE_RESULTS": "0"}
    command = [sys.executable, "-c", "import test_delta_rule_on_cuda as test; test.interpreted()"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path, **settings})


class _Number(int):
    """A number of a loop. Kernels convert it, as they may what the compiler makes of it."""

    def to(self, _dtype: Any) -> "_Number":
        return self


def interpreted() -> None:
    """Runs the kernels on the CPU, without measuring their tiles, which needs a card."""
    from fla.ops.common import chunk_delta_h
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda *_, **__: [0.0] * 3
    chunk_delta_h.range = lambda *bounds: map(_Number, builtins.range(*map(int, bounds)))
    for dtype, attention_choice._FAR in BOUND.items():
        for rule in (SMALL, LARGE):
            try_delta_rule(FLA, rule, dtype, torch.device("cpu"))
