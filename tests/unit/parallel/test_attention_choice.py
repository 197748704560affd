"""Which attention kernel a rank uses, from its device, dtype, head width and packages."""

from typing import Any

import pytest
import torch

from raypp.errors import JobError, RayppError
from raypp.job.layer_rules import NO_RULE, AttentionRule
from raypp.job.load import parse_job
from raypp.stages.models.attention import PLAIN, AttentionKernel
from raypp.stages.parallel.attention_choice import KERNELS, Setting, choose_attention, reason_against, try_kernel

CPU = torch.device("cpu")
BARE = {"torch": "2.13.0+cu130", "triton": ""}
CUDNN = {**BARE, "cudnn": "91900"}
ALL = {**CUDNN, "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b16"}
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
