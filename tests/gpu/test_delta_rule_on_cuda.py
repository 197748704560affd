"""What computes delta rules on a GPU: the kernels of flash-linear-attention, or compiled operators.
Without a GPU, Triton's interpreter runs the kernels, where fla-core and Triton are installed."""

import builtins
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from raypp.job.layer_rules import DeltaRule
from raypp.job.load import parse_job
from raypp.stages.models.attention import PLAIN
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.fla_delta_rule import chunked
from raypp.stages.parallel import attention_choice
from raypp.stages.parallel.delta_rule_choice import try_delta_rule, with_delta_rule

there = find_spec("fla") is not None and find_spec("triton") is not None
needs_fla = pytest.mark.skipif(not there, reason="fla-core or Triton is not installed")
# Relative to the norm, of output and gradients. Interpreted, they are within 2e-6 and 7e-4.
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.mark.gpu
@pytest.mark.parametrize("way", [pytest.param("fla", marks=needs_fla), "compiled"])
def test_a_card_chooses_it_and_then_never_waits(way: str) -> None:
    job = parse_job({"name": "a", "model": {"kind": "qwen3_5"}, "train": {"precision": "bf16"}})
    device = torch.device("cuda", 0)
    choice = attention_choice.choose_attention(job, device)
    if way == "compiled":
        choice = replace(choice, setting=replace(choice.setting, packages={"torch": "2.13.0"}))
    choice = with_delta_rule(choice, job, device)
    assert f"delta rules by {way}" in str(choice) and choice.kernel.delta is not None, str(choice)
    documents = PackedDocuments.of_lengths((5, 70)).moved(lambda t: t.to(device))
    q, k, v = (torch.randn(75, heads, 128, device=device, dtype=torch.bfloat16) for heads in (1, 1, 2))
    rest = -torch.rand(75, 2, device=device), torch.rand(75, 2, device=device).bfloat16()
    choice.kernel.delta(documents, q, k, v, *rest)  # measures its tiles, or compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        choice.kernel.delta(documents, q, k, v, *rest)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_fla
def test_the_interpreter_gives_the_numbers_of_the_operators(tmp_path: Path) -> None:
    # In a process of its own: Triton reads its settings when it is imported.
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    settings = {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "FLA_CACHE_RESULTS": "0"}
    command = [sys.executable, "-c", "import test_delta_rule_on_cuda as test; test.interpreted()"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path, **settings})


def interpreted() -> None:
    """The interpreter measures no tiles, and gives loops numbers that kernels cannot convert."""
    from fla.ops.common import chunk_delta_h
    from triton.runtime.autotuner import Autotuner

    number = type("number", (int,), {"to": lambda self, _dtype: self})
    Autotuner._bench = lambda *_, **__: [0.0] * 3
    chunk_delta_h.range = lambda *bounds: map(number, builtins.range(*map(int, bounds)))
    for dtype, attention_choice._FAR in BOUND.items():
        for rule in (DeltaRule(2, 4, 16, 32, 4), DeltaRule(1, 2, 128, 128, 4)):
            try_delta_rule(replace(PLAIN, delta=chunked), rule, dtype, torch.device("cpu"))
