"""Chooses a rank's attention kernel, once, before its stages are built.

`train.attention: auto` takes the first kernel of `KERNELS` that suits the device, the dtype, the
head width and the packages that are installed, and that gives plain's numbers on a small example.
The reasons against those before it are kept for the report. `delta_rule_choice` chooses likewise
what computes delta rules.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from raypp.errors import JobError, Problem, RayppError, in_words
from raypp.job.job import Job
from raypp.job.layer_rules import NO_RULE, AttentionRule
from raypp.stages.models.attention import PLAIN, AttentionKernel, Segments, packed_attention
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.parallel.apply import compute_dtype

KERNELS = ("flash3", "flash4", "cudnn", "varlen", "flex", "plain")
"""All kernels, the fastest first: on no card do more of the first two run than suit it."""


@dataclass(frozen=True)
class Package:
    """A distribution that brings a kernel.

    Attributes:
        what: Its project.
        majors: Cards by their major compute capability.
        widest: The widest head.
        torch: The oldest torch that calls it as read.
        first: The first version that has what torch calls, with torch's arguments and results.
        end: The first that has not, or was not read.
    """

    name: str
    what: str
    majors: tuple[int, ...]
    widest: int
    torch: tuple[int, int]
    first: str
    end: str


PACKAGES = {
    # Its numbers were compared on CPUs, by Triton's interpreter.
    "fla": Package("fla-core", "flash-linear-attention", (8, 9, 10, 12), 256, (2, 11), "0.6.0", "0.6.1"),
    "flash3": Package("flash-attn-3", "FlashAttention 3", (9,), 256, (2, 11), "3.0.0b1", "3.0.1"),
    # From b20 on its forward returns more than the two tensors that torch 2.13 unpacks.
    "flash4": Package("flash-attn-4", "FlashAttention 4", (9, 10), 128, (2, 13), "4.0.0b10", "4.0.0b17"),
}
_CUDNN = 91000
"""The oldest cuDNN that is tried, 9.10: torch 2.11 comes with it or a newer one."""
_FAR = 0.02
"""Relative difference from plain's numbers beyond which a kernel is wrong. bf16 rounds to 0.004."""


@dataclass(frozen=True)
class Setting:
    """What decides which kernels can be used. `device`: the type of the device, `cpu` or `cuda`.
    `capability`: compute capability of the device; (0, 0) on a CPU. `packages`: versions of what is
    installed: distributions of `PACKAGES`, torch, triton, cudnn."""

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    selective: bool
    ring: bool
    packages: Mapping[str, str]
    rules: frozenset[AttentionRule] = frozenset({NO_RULE})

    @classmethod
    def of(cls, job: Job, device: torch.device) -> Setting:
        """Returns the setting of a job on a device of this machine."""
        return cls(
            device.type,
            torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
            compute_dtype(job),
            job.model.widest_head,
            job.train.activation_checkpointing == "selective",
            job.mesh.cp > 1 and job.mesh.cp_style == "ring",
            _installed(),
            frozenset(job.model.attention_rule(index) for index in range(job.model.num_layers)),
        )

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        card = f"compute capability {self.capability[0]}.{self.capability[1]}, " if self.device == "cuda" else ""
        return f"{self.device}, {card}{dtype}, head width {self.head_dim}"


def _installed() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if importlib.util.find_spec("triton") is not None:
        found["triton"] = ""
    if cudnn := torch.backends.cudnn.version():  # type: ignore[no-untyped-call]
        found["cudnn"] = str(cudnn)
    for package in PACKAGES.values():
        try:
            found[package.name] = metadata.version(package.name)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel a rank uses. `against`: for each kernel that would have been preferred, the reason
    why it is not used. `failed`: those of them that suit the setting but did not run. `delta`: what
    computes delta rules; "" without any."""

    kernel: AttentionKernel
    setting: Setting
    against: dict[str, str] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    delta: str = ""

    def __str__(self) -> str:
        reasons = "".join(f"; not {name}: {reason}" for name, reason in self.against.items())
        hops = ""
        if self.setting.ring and self.setting.device == "cuda":
            if self.kernel.blocks is None:
                hops = ", the ring's blocks written out"
            elif any(rule.window is not None for rule in self.setting.rules):
                hops = ", the ring's blocks of layers with a window written out"
        return f"attention by {self.kernel.name}{hops} ({self.setting}){reasons}{self.delta and '; '}{self.delta}"


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
        return "it needs train.precision: bf16 or fp16"
    if setting.head_dim % 8 or setting.head_dim > 256:
        return f"it needs a head width that is a multiple of 8 up to 256, not {setting.head_dim}"
    if setting.capability < (8, 0):
        return "it needs compute capability 8.0 or higher"
    if kernel in PACKAGES:
        return against_package(PACKAGES[kernel], setting)
    if kernel == "cudnn":
        return _against_cudnn(setting)
    if setting.capability[0] in (10, 11):
        return "FlashAttention 2 is made for older cards and reaches a fraction of this one's rate"
    return None


def against_package(package: Package, setting: Setting) -> str | None:
    """Returns why a package's kernel cannot be used on CUDA in this setting; None if it can."""
    if setting.capability[0] not in package.majors:
        return f"it needs compute capability {' or '.join(f'{major}.x' for major in package.majors)}"
    if setting.head_dim > package.widest:
        return f"it needs a head width of at most {package.widest}, not {setting.head_dim}"
    if _numbers(setting.packages["torch"])[:2] < package.torch:
        return f"it needs torch {'.'.join(map(str, package.torch))}, not {setting.packages['torch']}"
    found = setting.packages.get(package.name)
    if found is None:
        return f"{package.name} ({package.what}) is not installed"
    if not _numbers(package.first) <= _numbers(found) < _numbers(package.end):
        return f"{package.name} {found} was not tested; install {package.first} or later, before {package.end}"
    return None


def _against_cudnn(setting: Setting) -> str | None:
    if setting.capability[0] not in (9, 10):
        return "it needs compute capability 9.x or 10.x"
    if int(setting.packages.get("cudnn", 0)) < _CUDNN:
        return f"cuDNN {setting.packages.get('cudnn', '')} was not tested; it needs {_CUDNN} or later".replace(
            "  ", " "
        )
    if setting.head_dim > 128:
        return f"it needs a head width of at most 128, not {setting.head_dim}"
    if setting.ring:
        return "ring attention cannot use it; mesh.cp_style: ulysses can"
    if any(rule.window is not None or rule.sinks for rule in setting.rules):
        return "it has neither windows nor sinks, which the model's layers have"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Returns a version that can be compared; a final release comes after its betas."""
    public = version.partition("+")[0]
    release, beta, number = public.partition("b")
    digits = [int("".join(filter(str.isdigit, part)) or 0) for part in (release.split(".") + ["0"] * 3)[:3]]
    return (*digits, int(number) if beta and number.isdigit() else 1 << 30)


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
    """Chooses the kernel, and runs it once on CUDA. Raises JobError: the job's cannot be used."""
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
    # Imported here: a CPU rank needs none.
    if name in ("flash3", "flash4", "varlen"):
        from raypp.stages.models.varlen_attention import varlen_kernel

        return varlen_kernel(name)
    if name == "cudnn":
        from raypp.stages.models.cudnn_attention import CUDNN

        return CUDNN
    if name == "flex":
        from raypp.stages.models.flex_attention import flex_kernel

        return flex_kernel()
    return PLAIN


def try_kernel(kernel: AttentionKernel, job: Job, device: torch.device) -> None:
    """Runs a forward and a backward of a kernel with the job's heads, for two sets of lengths.
    Raises RayppError: its numbers are not the plain version's; Exception: as the kernel does."""
    heads, kv_heads, width = job.model.num_heads, job.model.kv_heads, job.model.widest_head
    options: dict[str, Any] = {"dtype": compute_dtype(job), "device": device}
    for lengths in ((5, 40), (64, 13, 60)):
        tokens = sum(lengths)
        q, k, v = (_waves(tokens, n, width, **options).requires_grad_() for n in (heads, kv_heads, kv_heads))
        documents = PackedDocuments.of_lengths(lengths, kernel=kernel).moved(lambda t: t.to(device))
        for rule in Setting.of(job, device).rules:
            sinks = [torch.ones(heads, **options).requires_grad_()] if rule.sinks else []
            # A window that a document exceeds: the job's would be no limit here.
            small = rule if rule.window is None else replace(rule, window=7)
            found, wanted = (
                _results((q, k, v, *sinks), replace(documents, kernel=one), small) for one in (kernel, PLAIN)
            )
            compare(kernel.name, found, wanted)
        if kernel.blocks is not None and Setting.of(job, device).ring:
            with torch.no_grad():
                whole = Segments(documents.cu_seqlens, documents.cu_seqlens, max(lengths), max(lengths), causal=False)
                out, lse = kernel.blocks.forward(q, k, v, whole)
                kernel.blocks.backward(torch.ones_like(out), q, k, v, out, lse, whole)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(kernel: str, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Raises RayppError: results `[...]` of a kernel are not those of the plain version."""
    for one, other in zip(found, wanted, strict=True):
        if not float((one.float() - other.float()).norm()) <= _FAR * float(other.float().norm()):
            raise RayppError(f"{kernel} gives other numbers than plain", "train.attention: plain")


def _waves(*shape: int, **options: Any) -> Tensor:
    """Returns values in [-1, 1] that differ from each other and from those of other shapes."""
    count = math.prod(shape)
    return torch.sin(torch.arange(count, dtype=torch.float64) * 1.7 + count).view(shape).to(**options)


def _results(leaves: Sequence[Tensor], documents: PackedDocuments, rule: AttentionRule) -> tuple[Tensor, ...]:
    """Returns the output and the gradients of leaves: q, k, v and, by the rule, sinks."""
    out = packed_attention(*leaves[:3], documents, rule, *leaves[3:])
    return (out.detach(), *torch.autograd.grad(out, leaves, _waves(*out.shape, dtype=out.dtype, device=out.device)))
