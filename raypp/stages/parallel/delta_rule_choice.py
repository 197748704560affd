"""Chooses what computes a rank's delta rules, with its attention kernel: on CUDA the kernels of
flash-linear-attention, where they suit the setting and give the numbers of torch's operators on a
small example; else these operators, and the reason is kept for the report."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from raypp.errors import in_words
from raypp.job.job import Job
from raypp.job.layer_rules import DeltaRule
from raypp.stages.models.attention import PLAIN, AttentionKernel
from raypp.stages.models.delta_rule import mixed_by_rule
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.fla_delta_rule import chunked
from raypp.stages.parallel.attention_choice import (
    PACKAGES,
    AttentionChoice,
    Setting,
    against_package,
    compare,
)

_FLA = PACKAGES["fla"]


def with_delta_rule(choice: AttentionChoice, job: Job, device: torch.device) -> AttentionChoice:
    """Returns a rank's choice with that of its delta rules, if the model has any."""
    rules = {job.model.state_rule(index) for index in range(job.model.num_layers)}
    found = [rule for rule in rules if isinstance(rule, DeltaRule)]
    if not found:
        return choice
    failed, reason = choice.failed, reason_against_fla(job, choice.setting, found)
    if reason is None:
        kernel = replace(choice.kernel, delta=chunked)
        try:
            for rule in found:
                try_delta_rule(kernel, rule, choice.setting.dtype, device)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            failed, reason = (*failed, "fla"), f"it failed on a small example: {in_words(error)}"
        else:
            name = f"{_FLA.name} {choice.setting.packages[_FLA.name]}"
            return replace(choice, kernel=kernel, delta=f"delta rules by fla ({name})")
    return replace(choice, failed=failed, delta=f"delta rules by torch's operators; not fla: {reason}")


def reason_against_fla(job: Job, setting: Setting, rules: Sequence[DeltaRule]) -> str | None:
    """Returns why the package's kernels cannot compute a job's delta rules; None if they can."""
    if job.train.attention == "plain":
        return "train.attention: plain"
    if setting.device != "cuda":
        return f"it needs CUDA, the ranks compute on {setting.device}"
    if job.mesh.cp > 1:
        return "with mesh.cp it would have to give how a part of a document changes its state"
    if setting.dtype not in (torch.bfloat16, torch.float16):
        return "it needs train.precision: bf16 or fp16"
    return against_package(_FLA, replace(setting, head_dim=max(rule.key_dim for rule in rules)))


def try_delta_rule(kernel: AttentionKernel, rule: DeltaRule, dtype: torch.dtype, device: torch.device) -> None:
    """Runs a forward and a backward of a rule by a kernel. Raises RayppError: its numbers are not
    those of torch's operators; Exception: as the kernel does."""
    lengths = (5, 70, 1, 64)
    tokens, wide = sum(lengths), torch.promote_types(dtype, torch.float32)
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device, wide)

    mixed, weight = drawn(tokens, rule.channels).to(dtype), drawn(rule.channels, 1, rule.kernel).to(dtype)
    decay, beta = drawn(tokens, rule.value_heads), drawn(tokens, rule.value_heads)
    leaves = [one.requires_grad_() for one in (mixed, -F.softplus(decay), beta.sigmoid().to(dtype), weight)]
    slopes = drawn(tokens, rule.value_heads, rule.value_dim).to(dtype)
    documents = PackedDocuments.of_lengths(lengths).moved(lambda t: t.to(device))
    results = []
    for one in (kernel, PLAIN):
        out = mixed_by_rule(*leaves, rule, replace(documents, kernel=one))
        results.append((out.detach(), *torch.autograd.grad(out, leaves, slopes)))
    compare("fla", *results)
