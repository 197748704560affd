"""Which attention kernel a rank uses, from its device, dtype, head width and packages; likewise
what computes its delta rules."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from raypp.errors import JobError, RayppError
from raypp.job.layer_rules import NO_RULE, AttentionRule, DeltaRule
from raypp.job.load import parse_job
from raypp.stages.models.attention import PLAIN, AttentionKernel
from raypp.stages.models.delta_rule import operators, within_chunks
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.fla_delta_rule import _chunks
from raypp.stages.parallel import delta_rule_choice
from raypp.stages.parallel.attention_choice import (
    KERNELS,
    AttentionChoice,
    Setting,
    choose_attention,
    reason_against,
    try_kernel,
)

CPU = torch.device("cpu")
BARE = {"torch": "2.13.0+cu130", "triton": ""}
CUDNN = {**BARE, "cudnn": "91900"}
ALL = {**CUDNN, "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b16"}
FLA = {**ALL, "fla-core": "0.6.0"}
RULE = DeltaRule(key_heads=1, value_heads=2, key_dim=16, value_dim=8, kernel=4)
AMPERE, HOPPER, BLACKWELL, CONSUMER = (8, 0), (9, 0), (10, 0), (12, 0)


def setting(**changes: Any) -> Setting:
    given: dict[str, Any] = {
        "device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 128, "selective": False,
        "ring": False, "packages": ALL, **changes,
    }  # fmt: skip
    return Setting(**given)


def usable(**changes: Any) -> list[str]:
    return [name for name in KERNELS if reason_against(name, setting(**changes)) is None]


WINDOWS = frozenset({NO_RULE, AttentionRule(window=9)})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "flash3 flash4 cudnn varlen flex plain"),
        ({"capability": AMPERE}, "varlen flex plain"),
        ({"capability": (8, 6)}, "varlen flex plain"),
        ({"capability": BLACKWELL}, "flash4 cudnn flex plain"),
        ({"capability": (11, 0)}, "flex plain"),
        ({"capability": CONSUMER}, "varlen flex plain"),
        ({"packages": BARE}, "varlen flex plain"),
        ({"packages": CUDNN}, "cudnn varlen flex plain"),
        ({"packages": {**CUDNN, "cudnn": "90800"}}, "varlen flex plain"),
        ({"packages": {**ALL, "torch": "2.11.0"}}, "flash3 cudnn varlen flex plain"),
        ({"packages": {**ALL, "flash-attn-3": "3.1.0"}}, "flash4 cudnn varlen flex plain"),
        ({"packages": {**ALL, "flash-attn-3": "3.0.0b1"}}, "flash3 flash4 cudnn varlen flex plain"),
        ({"packages": {**ALL, "flash-attn-4": "4.0.0b36"}}, "flash3 cudnn varlen flex plain"),
        ({"packages": {**ALL, "flash-attn-4": "4.0.0"}}, "flash3 cudnn varlen flex plain"),
        ({"packages": {**ALL, "flash-attn-4": "main"}}, "flash3 cudnn varlen flex plain"),
        ({"capability": BLACKWELL, "packages": CUDNN, "selective": True}, "cudnn plain"),
        ({"capability": BLACKWELL, "ring": True}, "flash4 plain"),
        ({"capability": BLACKWELL, "rules": WINDOWS}, "flash4 flex plain"),
        ({"selective": True}, "flash3 flash4 cudnn varlen plain"),
        ({"ring": True}, "flash3 flash4 varlen plain"),
        ({"head_dim": 256}, "flash3 varlen flex plain"),
        ({"head_dim": 256, "packages": {"torch": "2.13.0"}}, "varlen plain"),
        ({"head_dim": 264}, "flex plain"),
        ({"head_dim": 12}, "plain"),
        ({"capability": (7, 5)}, "flex plain"),
        ({"dtype": torch.float32}, "flex plain"),
        ({"dtype": torch.float32, "capability": (6, 1)}, "plain"),
        ({"dtype": torch.float64}, "plain"),
        ({"device": "cpu", "capability": (0, 0)}, "plain"),
        ({"rules": frozenset({NO_RULE, AttentionRule(soft_cap=50.0)})}, "flex plain"),
        ({"rules": frozenset({AttentionRule(window=9, sinks=True)})}, "flash3 flash4 varlen flex plain"),
    ],
)
def test_the_kernels_that_suit_a_setting(changes: dict[str, Any], expected: str) -> None:
    assert usable(**changes) == expected.split()


def test_a_package_of_a_version_that_was_not_tested_is_named_with_those_that_were() -> None:
    reason = str(reason_against("flash4", setting(packages={**ALL, "flash-attn-4": "4.0.0b36"})))
    assert reason == "flash-attn-4 4.0.0b36 was not tested; install 4.0.0b10 or later, before 4.0.0b17"
    assert "FlashAttention 3) is not installed" in str(reason_against("flash3", setting(packages=BARE)))
    assert "fraction" in str(reason_against("varlen", setting(capability=BLACKWELL)))


def test_a_kernel_with_other_numbers_than_plain_is_not_used() -> None:
    job = parse_job({"name": "a", "model": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}})
    try_kernel(PLAIN, job, CPU)
    late = AttentionKernel("late", lambda q, k, v, *more: PLAIN.attend(q, k.roll(1, 0), v, *more))
    with pytest.raises(RayppError, match="late gives other numbers than plain"):
        try_kernel(late, job, CPU)


def test_a_cpu_uses_the_plain_version_and_says_why_not_the_others() -> None:
    choice = choose_attention(parse_job({"name": "a"}), CPU)
    assert (choice.kernel.name, list(choice.against)) == ("plain", list(KERNELS[:-1]))
    assert str(choice).startswith("attention by plain (cpu, float32, head width 64); not flash3: it needs CUDA")
    named = choose_attention(parse_job({"name": "a", "train": {"attention": "plain"}}), CPU)
    assert (named.kernel, named.against) == (choice.kernel, {})


@pytest.mark.parametrize("kernel", KERNELS[:-1])
def test_a_named_kernel_that_cannot_be_used_is_refused_with_the_reason(kernel: str) -> None:
    with pytest.raises(JobError, match=rf"train.attention: {kernel} cannot be used here \(cpu.*it needs CUDA"):
        choose_attention(parse_job({"name": "a", "train": {"attention": kernel}}), CPU)


def test_the_rules_are_those_of_the_jobs_layers() -> None:
    job = parse_job({"name": "a", "model": {"kind": "gemma3", "num_layers": 7}})
    windows = {rule.window for rule in Setting.of(job, CPU).rules}
    assert windows == {512, None}


def test_flash_linear_attention_suits_bf16_on_cuda_with_a_tested_version() -> None:
    def reason(name: str = "fla", rule: DeltaRule = RULE, job: dict[str, Any] | None = None, **changes: Any) -> str:
        made = parse_job({"name": "a", "model": {"kind": "qwen3_5"}, **(job or {})})
        return str(
            delta_rule_choice.reason_against(name, made, setting(**{"packages": FLA, **changes}), [RULE, rule], CPU)
        )

    assert reason() == reason(job={"train": {"attention": "varlen"}}) == "None"
    assert reason(job={"train": {"attention": "plain"}}) == "train.attention: plain"
    assert "part of a document" in reason(job={"mesh": {"cp": 2}})
    assert "needs CUDA, the ranks compute on cpu" in reason(device="cpu")
    assert "train.precision: bf16 or fp16" in reason(dtype=torch.float32)
    assert "compute capability 8.x or 9.x" in reason(capability=(7, 5))
    assert "at most 256, not 264" in reason(rule=replace(RULE, key_dim=264))
    assert reason(packages=ALL) == "fla-core (flash-linear-attention) is not installed"
    untested = "fla-core 0.6.1 was not tested; install 0.6.0 or later, before 0.6.1"
    assert reason(packages={**ALL, "fla-core": "0.6.1"}) == untested
    assert reason("compiled") == "Triton's kernels do not run: they need CUDA, this is cpu"


def test_a_package_that_does_not_run_is_named_and_not_used() -> None:
    choice = AttentionChoice(PLAIN, setting(packages=FLA), failed=("flash3",))
    assert delta_rule_choice.with_delta_rule(choice, parse_job({"name": "a"}), CPU) is choice
    found = delta_rule_choice.with_delta_rule(choice, parse_job({"name": "a", "model": {"kind": "qwen3_5"}}), CPU)
    assert (found.kernel, found.failed) == (PLAIN, ("flash3", "fla"))
    assert "; delta rules by operators; not fla: it failed on a small example: " in str(found)


def test_numbers_other_than_those_of_the_operators_are_refused() -> None:
    def shifted(documents: PackedDocuments, q: Tensor, k: Tensor, *rest: Tensor, by: int) -> Tensor:
        return operators(documents, q, k.roll(by, 0), *rest)

    delta_rule_choice.try_delta_rule(replace(PLAIN, delta=partial(shifted, by=0)), RULE, torch.bfloat16, CPU)
    with pytest.raises(RayppError, match="it gives other numbers than plain"):
        delta_rule_choice.try_delta_rule(replace(PLAIN, delta=partial(shifted, by=1)), RULE, torch.bfloat16, CPU)


def test_chunks_compile_to_one_graph_and_have_places_whatever_documents_there_are() -> None:
    graphs = []

    def counting(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(within_chunks, backend=counting, dynamic=True, fullgraph=True)
    for lengths in ((5, 70, 1, 64), (200,), (5, 128, 1, 129)):
        inputs = [-torch.rand(sum(lengths), *size) for size in ((1, 16), (1, 16), (2, 8), (2,), (2,))]
        documents = PackedDocuments.of_lengths(lengths)
        assert torch.equal(operators(documents, *inputs, within=compiled), operators(documents, *inputs))
    assert len(graphs) == 1
    assert _chunks(documents.cu_seqlens.long(), 7).tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], [3, 0], [3, 1], [3, 2]]
