"""Chooses what computes a rank's delta rules, with its attention kernel. On CUDA: the kernels of
flash-linear-attention, else torch's operators, compiled, each where it suits the setting and gives
the numbers of the operators on a small example; else these. The reasons are kept for the report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from raypp.errors import in_words
from raypp.job.job import Job
from raypp.job.layer_rules import DeltaRule
from raypp.stages.models import fused
from raypp.stages.models.attention import PLAIN, AttentionKernel
from raypp.stages.models.delta_rule import mixed_by_rule, operators, within_chunks
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.fla_delta_rule import chunked
from raypp.stages.models.loss import COMPILER_OPTIONS
from raypp.stages.parallel.attention_choice import PACKAGES, AttentionChoice, Setting, against_package, compare


def with_delta_rule(choice: AttentionChoice, job: Job, device: torch.device) -> AttentionChoice:
    """Returns a rank's choice with that of its delta rules, if the model has any."""
    rules = {job.model.state_rule(index) for index in range(job.model.num_layers)}
    deltas = [rule for rule in rules if isinstance(rule, DeltaRule)]
    if not deltas:
        return choice
    failed, said = choice.failed, ""
    for name, made in (("fla", lambda: chunked), ("compiled", _compiled)):
        reason = reason_against(name, job, choice.setting, deltas, device)
        if reason is None:
            try:
                kernel = replace(choice.kernel, delta=made())
                for rule in deltas:
                    try_delta_rule(kernel, rule, choice.setting.dtype, device)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - of Triton or the package: the next way computes the same
                failed, reason = (*failed, name), f"it failed on a small example: {in_words(error)}"
            else:
                return replace(choice, kernel=kernel, failed=failed, delta=f"delta rules by {name}{said}")
        said += f"; not {name}: {reason}"
    return replace(choice, failed=failed, delta=f"delta rules by operators{said}")


def _compiled() -> Callable[..., Tensor]:
    return partial(operators, within=torch.compile(within_chunks, dynamic=True, options={**COMPILER_OPTIONS}))


def reason_against(
    name: str, job: Job, setting: Setting, rules: Sequence[DeltaRule], device: torch.device
) -> str | None:
    """Returns why "fla" or "compiled" cannot compute a job's delta rules; None if it can."""
    if setting.device != "cuda":
        return f"it needs CUDA, the ranks compute on {setting.device}"
    if job.train.attention == "plain":
        return "train.attention: plain"
    if job.mesh.cp > 1:
        return "with mesh.cp it would have to give how a part of a document changes its state"
    if name == "compiled":
        return None if (reason := fused.reason_against(device)) is None else f"Triton's kernels do not run: {reason}"
    if setting.dtype not in (torch.bfloat16, torch.float16):
        return "it needs train.precision: bf16 or fp16"
    return against_package(PACKAGES["fla"], replace(setting, head_dim=max(rule.key_dim for rule in rules)))


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
    compare("it", *results)
