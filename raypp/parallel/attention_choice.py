"""Chooses a rank's attention kernel, once, before its stages are built.

`train.attention: auto` takes the first kernel of `KERNELS` that suits the device, the dtype and the
head width and that runs on a small example. The reasons against those before it are kept for the
report.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from raypp.errors import JobError, Problem, in_words
from raypp.models.attention import PLAIN, packed_attention
from raypp.models.attention_kernel import AttentionKernel, Segments
from raypp.models.documents import PackedDocuments
from raypp.parallel.apply import compute_dtype
from raypp.spec.attention_rule import NO_RULE, AttentionRule
from raypp.spec.job import Job

KERNELS = ("flash3", "varlen", "flex", "plain")
"""All kernels, the fastest first."""

FLASH3_PACKAGE = "flash_attn_interface"


@dataclass(frozen=True)
class Setting:
    """What decides which kernels can be used.

    Attributes:
        device: The type of the device, `cpu` or `cuda`.
        capability: Compute capability of the device; (0, 0) on a CPU.
        dtype: The dtype of queries, keys and values.
        head_dim: The head width.
        selective: The job uses selective activation checkpointing.
        ring: The job uses ring attention.
        packages: Those of `flash_attn_interface` and `triton` that are installed.
        rules: The rules of the model's layers.
    """

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    selective: bool
    ring: bool
    packages: frozenset[str]
    rules: frozenset[AttentionRule] = frozenset({NO_RULE})

    @classmethod
    def of(cls, job: Job, device: torch.device) -> Setting:
        """Returns the setting of a job on a device of this machine."""
        packages = frozenset(name for name in (FLASH3_PACKAGE, "triton") if importlib.util.find_spec(name) is not None)
        return cls(
            device.type,
            torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
            compute_dtype(job),
            job.model.dim_per_head,
            job.train.activation_checkpointing == "selective",
            job.mesh.cp > 1 and job.mesh.cp_style == "ring",
            packages,
            frozenset(job.model.attention_rule(index) for index in range(job.model.num_layers)),
        )

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        card = f"compute capability {self.capability[0]}.{self.capability[1]}, " if self.device == "cuda" else ""
        return f"{self.device}, {card}{dtype}, head width {self.head_dim}"


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel a rank uses.

    Attributes:
        kernel: The kernel.
        setting: What it was chosen for.
        against: For each kernel that would have been preferred, the reason why it is not used.
        failed: Those of them that suit the setting but did not run.
    """

    kernel: AttentionKernel
    setting: Setting
    against: dict[str, str] = field(default_factory=dict)
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        reasons = "".join(f"; not {name}: {reason}" for name, reason in self.against.items())
        hops = ""
        if self.setting.ring and self.setting.device == "cuda":
            if self.kernel.blocks is None:
                hops = ", the ring's blocks written out"
            elif any(rule.window is not None for rule in self.setting.rules):
                hops = ", the ring's blocks of layers with a window written out"
        return f"attention by {self.kernel.name}{hops} ({self.setting}){reasons}"


def reason_against(kernel: str, setting: Setting) -> str | None:
    """Returns why a kernel cannot be used in this setting; None if it can."""
    if kernel == "plain":
        return None
    if setting.device != "cuda":
        return f"it needs CUDA, the ranks compute on {setting.device}"
    if kernel == "flex":
        return _against_flex(setting)
    if any(rule.soft_cap is not None for rule in setting.rules):
        return "it has no soft cap of the scores, which the model's layers have"
    if setting.dtype not in (torch.bfloat16, torch.float16):
        return "it needs train.precision: bf16"
    if setting.head_dim % 8 or setting.head_dim > 256:
        return f"it needs a head width that is a multiple of 8 up to 256, not {setting.head_dim}"
    if setting.capability < (8, 0):
        return "it needs compute capability 8.0 or higher"
    if kernel == "flash3":
        if setting.capability[0] != 9:
            return "it needs compute capability 9.x"
        if FLASH3_PACKAGE not in setting.packages:
            return f"{FLASH3_PACKAGE} (FlashAttention 3) is not installed"
    return None


def _against_flex(setting: Setting) -> str | None:
    if setting.ring:
        return "ring attention cannot use it; mesh.cp_style: ulysses can"
    if setting.selective:
        return "selective activation checkpointing cannot keep the results of its compiled kernel"
    if "triton" not in setting.packages:
        return "triton is not installed"
    if setting.capability < (7, 0):
        return "it needs compute capability 7.0 or higher"
    if setting.dtype == torch.float64:
        return "it does not compute in float64"
    if setting.head_dim < 16:
        return f"it needs a head width of at least 16, not {setting.head_dim}"
    return None


def choose_attention(job: Job, device: torch.device) -> AttentionChoice:
    """Chooses the kernel, and runs it once on CUDA, which also loads it.

    Raises:
        JobError: The kernel that the job names cannot be used.
    """
    setting, wanted = Setting.of(job, device), job.train.attention
    against: dict[str, str] = {}
    failed: list[str] = []
    for name in KERNELS if wanted == "auto" else (wanted,):
        reason = reason_against(name, setting)
        if reason is None:
            try:
                kernel = _kernel(name)
                if setting.device == "cuda":
                    try_kernel(kernel, job, device)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if name == "plain":
                    raise
                failed.append(name)
                reason = f"it failed on a small example: {in_words(error)}"
            else:
                return AttentionChoice(kernel, setting, against, tuple(failed))
        against[name] = reason
    what = f"{wanted} cannot be used here ({setting}): {against[wanted]}"
    raise JobError(Problem("train.attention", what, "train.attention: auto"))


def _kernel(name: str) -> AttentionKernel:
    """Returns a kernel by its name."""
    # Imported here: a CPU rank needs neither.
    if name in ("flash3", "varlen"):
        from raypp.models.varlen_attention import varlen_kernel

        return varlen_kernel(name)
    if name == "flex":
        from raypp.models.flex_attention import flex_kernel

        return flex_kernel()
    return PLAIN


def try_kernel(kernel: AttentionKernel, job: Job, device: torch.device) -> None:
    """Runs a forward and a backward of a kernel with the job's heads, for two sets of lengths.

    Raises:
        Exception: Whatever the kernel raises.
    """
    heads, kv_heads, width = job.model.num_heads, job.model.kv_heads, job.model.dim_per_head
    options: dict[str, Any] = {"dtype": compute_dtype(job), "device": device}
    for lengths in ((5, 40), (64, 13, 60)):
        tokens = sum(lengths)
        q, k, v = (torch.ones(tokens, n, width, **options).requires_grad_() for n in (heads, kv_heads, kv_heads))
        documents = PackedDocuments.of_lengths(lengths, kernel=kernel).moved(lambda t: t.to(device))
        for rule in Setting.of(job, device).rules:
            sinks = [torch.ones(heads, **options).requires_grad_()] if rule.sinks else []
            # A window that a document exceeds: the job's would be no limit here.
            small = rule if rule.window is None else replace(rule, window=7)
            out = packed_attention(q, k, v, documents, small, *sinks)
            torch.autograd.grad(out.sum(), (q, k, v, *sinks))
        if kernel.blocks is not None and Setting.of(job, device).ring:
            with torch.no_grad():
                whole = Segments(documents.cu_seqlens, documents.cu_seqlens, max(lengths), max(lengths), causal=False)
                out, lse = kernel.blocks.forward(q, k, v, whole)
                kernel.blocks.backward(torch.ones_like(out), q, k, v, out, lse, whole)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
