"""The public names of the modules of torch that raypp may use, to compare two releases."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch

MODULES = [
    "torch", "torch.accelerator", "torch.autograd", "torch.autograd.graph", "torch.compiler", "torch.cuda",
    "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor", "torch.library", "torch.nn.attention", "torch.nn.attention.flex_attention",
    "torch.nn.attention.varlen", "torch.nn.functional", "torch.nn.utils", "torch.optim", "torch.profiler",
    "torch.utils.checkpoint",
]  # fmt: skip


def surface(rank: int, world: int, port: int) -> tuple[str, dict[str, set[str]]]:
    """Returns what this process's torch has. Takes a rank's arguments, for `run_in_turn`.

    Returns:
        torch's version; and by dotted name of a function, class or value: `(p)` for each parameter
        `p`, `.m` for each member `m` of a class.
    """
    with warnings.catch_warnings(action="ignore"):  # deprecated names warn when they are looked at
        return torch.__version__, {name: set(_parts(value)) for module in MODULES for name, value in _public(module)}


def added(old: dict[str, set[str]], new: dict[str, set[str]]) -> list[str]:
    """Returns what only the new release has, sorted: `torch.f`, `torch.f(p)` for a parameter of
    what both have, and `.m_n` for a member that no class of the old one has.

    Members of one word (`.out`) are left out: a source does not tell whose they are.
    """
    members = set().union(*old.values())
    parts = {(name, part) for name in new.keys() & old.keys() for part in new[name] - old[name]}
    parameters = {name + part for name, part in parts if part.startswith("(")}
    telling = {part for _, part in parts if part.startswith(".") and "_" in part} - members
    return sorted({*(new.keys() - old.keys()), *parameters, *telling})


def _public(module: str) -> Iterator[tuple[str, Any]]:
    for name, value in vars(importlib.import_module(module)).items():
        is_torchs = str(getattr(value, "__module__", module)).startswith("torch")
        # NCCL's names are those of a CUDA build.
        if is_torchs and not name.startswith("_") and "NCCL" not in name and not inspect.ismodule(value):
            yield f"{module}.{name}", value


def _parts(value: Any) -> Iterator[str]:
    with contextlib.suppress(TypeError, ValueError):  # no function, or one in C++
        yield from (f"({name})" for name in inspect.signature(value).parameters)
    if inspect.isclass(value):
        yield from (f".{name}" for name in dir(value) if not name.startswith("_"))
