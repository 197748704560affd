"""Which attention kernel a rank uses, from its device, dtype, head width and packages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypp.errors import JobError
from raypp.parallel.attention_choice import (
    FLASH3_PACKAGE,
    KERNELS,
    Setting,
    choose_attention,
    reason_against,
)
from raypp.spec.attention_rule import NO_RULE, AttentionRule
from raypp.spec.load import parse_job

CPU = torch.device("cpu")
BOTH = frozenset({FLASH3_PACKAGE, "triton"})


def setting(**changes: Any) -> Setting:
    given: dict[str, Any] = {
        "device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 128, "selective": False,
        "ring": False, "packages": BOTH, **changes,
    }  # fmt: skip
    return Setting(**given)


def usable(**changes: Any) -> list[str]:
    return [name for name in KERNELS if reason_against(name, setting(**changes)) is None]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["flash3", "varlen", "flex", "plain"]),
        ({"packages": frozenset({"triton"})}, ["varlen", "flex", "plain"]),
        ({"capability": (8, 6)}, ["varlen", "flex", "plain"]),
        ({"capability": (10, 0)}, ["varlen", "flex", "plain"]),
        ({"selective": True}, ["flash3", "varlen", "plain"]),
        ({"ring": True}, ["flash3", "varlen", "plain"]),
        ({"head_dim": 256, "packages": frozenset()}, ["varlen", "plain"]),
        ({"head_dim": 264}, ["flex", "plain"]),
        ({"head_dim": 36}, ["flex", "plain"]),
        ({"head_dim": 12}, ["plain"]),
        ({"capability": (7, 5)}, ["flex", "plain"]),
        ({"dtype": torch.float32}, ["flex", "plain"]),
        ({"dtype": torch.float32, "capability": (7, 5)}, ["flex", "plain"]),
        ({"dtype": torch.float32, "capability": (6, 1)}, ["plain"]),
        ({"dtype": torch.float64}, ["plain"]),
        ({"device": "cpu", "capability": (0, 0)}, ["plain"]),
        ({"rules": frozenset({NO_RULE, AttentionRule(soft_cap=50.0)})}, ["flex", "plain"]),
        ({"rules": frozenset({AttentionRule(window=9, sinks=True)})}, ["flash3", "varlen", "flex", "plain"]),
    ],
)
def test_the_kernels_that_suit_a_setting(changes: dict[str, Any], expected: list[str]) -> None:
    assert usable(**changes) == expected


def test_a_cpu_uses_the_plain_version_and_says_why_not_the_others() -> None:
    choice = choose_attention(parse_job({"name": "a"}), CPU)
    assert (choice.kernel.name, list(choice.against)) == ("plain", ["flash3", "varlen", "flex"])
    assert str(choice).startswith("attention by plain (cpu, float32, head width 64); not flash3: it needs CUDA")
    named = choose_attention(parse_job({"name": "a", "train": {"attention": "plain"}}), CPU)
    assert (named.kernel, named.against) == (choice.kernel, {})


@pytest.mark.parametrize("kernel", ["flash3", "varlen", "flex"])
def test_a_named_kernel_that_cannot_be_used_is_refused_with_the_reason(kernel: str) -> None:
    with pytest.raises(JobError, match=rf"train.attention: {kernel} cannot be used here \(cpu.*it needs CUDA"):
        choose_attention(parse_job({"name": "a", "train": {"attention": kernel}}), CPU)


def test_the_rules_are_those_of_the_jobs_layers() -> None:
    job = parse_job({"name": "a", "model": {"kind": "gemma3", "num_layers": 7}})
    windows = {rule.window for rule in Setting.of(job, CPU).rules}
    assert windows == {512, None}
