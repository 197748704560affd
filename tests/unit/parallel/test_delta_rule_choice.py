"""What computes a rank's delta rules, from its device, dtype, mesh and packages."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from raypp.errors import RayppError
from raypp.job.layer_rules import DeltaRule
from raypp.job.load import parse_job
from raypp.stages.models import fla_delta_rule
from raypp.stages.models.attention import PLAIN
from raypp.stages.models.delta_rule import _layout, _output
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.parallel.attention_choice import AttentionChoice, Setting
from raypp.stages.parallel.delta_rule_choice import reason_against_fla, try_delta_rule, with_delta_rule

CPU = torch.device("cpu")
RULE = DeltaRule(key_heads=1, value_heads=2, key_dim=16, value_dim=8, kernel=4)
BARE = {"torch": "2.13.0", "triton": ""}
ALL = {**BARE, "fla-core": "0.6.0"}
ON_H100 = Setting("cuda", (9, 0), torch.bfloat16, 512, selective=False, ring=False, packages=ALL)
JOB = parse_job({"name": "a", "model": {"kind": "qwen3_5"}})


def test_it_suits_bf16_on_cuda_with_a_tested_version() -> None:
    def reason(job: dict[str, Any] | None = None, rule: DeltaRule = RULE, **changes: Any) -> str:
        made = JOB if job is None else parse_job({"name": "a", "model": {"kind": "qwen3_5"}, **job})
        return str(reason_against_fla(made, replace(ON_H100, **changes), [RULE, rule]))

    assert reason() == reason({"train": {"attention": "varlen"}}) == "None"
    assert reason({"train": {"attention": "plain"}}) == "train.attention: plain"
    assert "part of a document" in reason({"mesh": {"cp": 2}})
    assert "needs CUDA, the ranks compute on cpu" in reason(device="cpu")
    assert "train.precision: bf16 or fp16" in reason(dtype=torch.float32)
    assert "compute capability 8.x or 9.x" in reason(capability=(7, 5))
    assert "at most 256, not 264" in reason(rule=replace(RULE, key_dim=264))
    untested = "fla-core 0.6.1 was not tested; install 0.6.0 or later, before 0.6.1"
    assert reason(packages={**BARE, "fla-core": "0.6.1"}) == untested


def test_the_choice_says_what_computes_delta_rules() -> None:
    choice = AttentionChoice(PLAIN, replace(ON_H100, packages=BARE))
    assert with_delta_rule(choice, parse_job({"name": "a"}), CPU) is choice
    ours = with_delta_rule(choice, JOB, CPU)
    assert (ours.kernel, ours.failed) == (PLAIN, ())
    reason = "fla-core (flash-linear-attention) is not installed"
    assert str(ours).endswith(f"; delta rules by torch's operators; not fla: {reason}")


def test_a_package_that_fails_is_named_and_not_used() -> None:
    """It is not installed, or has no card."""
    choice = with_delta_rule(AttentionChoice(PLAIN, ON_H100, failed=("flash3",)), JOB, CPU)
    assert (choice.kernel, choice.failed) == (PLAIN, ("flash3", "fla"))
    assert "not fla: it failed on a small example: " in choice.delta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_other_than_those_of_torchs_operators_are_refused(dtype: torch.dtype) -> None:
    def shifted(documents: PackedDocuments, q: Tensor, k: Tensor, *rest: Tensor, by: int) -> Tensor:
        return _output(q, k.roll(by, 0), *rest, layout=_layout(documents.lengths))

    try_delta_rule(replace(PLAIN, delta=partial(shifted, by=0)), RULE, dtype, CPU)
    with pytest.raises(RayppError, match="fla gives other numbers than plain"):
        try_delta_rule(replace(PLAIN, delta=partial(shifted, by=1)), RULE, dtype, CPU)


def test_the_chunks_of_documents_are_those_that_the_package_would_read_from_the_device() -> None:
    documents = PackedDocuments.of_lengths((5, 128, 1, 129))
    found = fla_delta_rule._chunks(documents.cu_seqlens.long(), 7)
    assert found.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], [3, 0], [3, 1], [3, 2]]
