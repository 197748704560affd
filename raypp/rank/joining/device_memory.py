"""Recognises that a device is out of memory, and says what held it and what would fit."""

import contextlib
import gc
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raypp.errors import RayppError, causes, in_words, size_text
from raypp.failure_kinds import FailureKind
from raypp.job.job import Job
from raypp.job.load import job_document
from raypp.planning.decision import Decision, RankMemory
from raypp.records import Seat
from raypp.stages.parallel.shard import local_part

log = logging.getLogger(__name__)

# What CUDA's libraries say when they allocate by themselves, past torch's allocator.
_FULL = (
    "CUDA error: out of memory",
    "Cuda failure 2 'out of memory'",
    "Cuda failure 'out of memory'",
    "Failed to CUDA malloc",
    "Failed to CUDA calloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
_FRAGMENTED = 0.1
_TAKEN = 2 << 30
"""Bytes beside torch's, and beside what is planned for CUDA and NCCL, that are another process'."""
_ASK_S = 10.0
_ROOM = 0.95
_BLOCKS = 5
_SEARCH_S = 5.0
"""Most seconds to look for changes that fit; the other ranks wait for the report."""
_START_S = 30.0


class DeviceMemoryError(RayppError):
    """This rank's device is out of memory."""

    failure_kind = FailureKind.DEVICE_OUT_OF_MEMORY


class DeviceTakenError(RayppError):
    """Other processes hold memory of this rank's device that the rank needs."""

    failure_kind = FailureKind.DEVICE_TAKEN


def free_cache() -> None:
    """Returns this process' unused memory to the device, where NCCL and other processes can use it.
    torch keeps what it frees, by stream, and the next attempt uses other streams."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):  # after a CUDA error nothing on the device answers
            torch.cuda.empty_cache()


def holders(uuid: str) -> str:
    """Returns who holds memory of a card, in words: "python (pid 7) 20 GiB". `uuid`: the card's,
    such as `GPU-5e1f…` or a part of it."""
    asked = [
        "nvidia-smi",
        "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return holders_in_words("", uuid, os.getpid())
    return holders_in_words(done.stdout if done.returncode == 0 else "", uuid, os.getpid())


def holders_in_words(listed: str, uuid: str, own: int) -> str:
    """Returns the processes of a card. `listed`: nvidia-smi's lines of `gpu_uuid, pid,
    process_name, used_memory` in MiB. `own`: this process' id, which is left out."""
    processes = []
    for line in listed.splitlines():
        card, pid, name, used = (part.strip() for part in (line.split(",") + [""] * 4)[:4])
        if uuid and uuid in card and pid != str(own):
            size = f" {size_text(int(used) << 20)}" if used.isdigit() else ""
            processes.append(f"{name} (pid {pid}){size}")
    if processes:
        return f"held by {', '.join(processes)}"
    return "nvidia-smi does not show here by whom: by a desktop, or by processes outside this container"


def out_of_device_memory(error: BaseException) -> bool:
    """Whether the device ran out of memory. An error that declares another kind keeps it."""
    if isinstance(error, RayppError) and error.failure_kind is not None:
        return False
    return any(_says_full(cause) for cause in causes(error))


def _says_full(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _FULL)


def device_memory_error(
    error: BaseException,
    decision: Decision,
    seat: Seat,
    stages: Sequence[nn.Module] = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> RayppError:
    """Returns the error to raise for a rank whose device is full: a `DeviceTakenError` if another
    process holds gigabytes of it."""
    first = next((cause for cause in causes(error) if _says_full(cause)), error)
    lines = [f"out of device memory: {in_words(first).splitlines()[0]}"]
    stats = _allocator(seat.device_index) if seat.device == "cuda" else {}
    lines += memory_lines(stats, _held(stages, optimizer))
    lines += planned(decision, seat.coordinates.pp, stats)
    if taken(stats, decision.memory[seat.coordinates.pp]) < _TAKEN:
        return DeviceMemoryError("\n".join(lines))
    lines[0] += f"; other processes have memory of this device, {holders(card_uuid(seat.device_index))}"
    return DeviceTakenError("\n".join(lines))


def taken(stats: Mapping[str, Any], planned: RankMemory) -> int:
    """Returns the bytes of a device that other processes hold, as far as statistics show."""
    if not stats:
        return 0
    return int(stats["total"] - stats["free"] - stats["reserved"]) - planned.runtime


def card_uuid(index: int) -> str:
    """Returns the identity of a card as nvidia-smi prints it; "" if torch does not know it."""
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


def memory_lines(stats: Mapping[str, Any], held: Mapping[str, int]) -> list[str]:
    """Returns lines about what held the memory. `stats`: `total` and `free` bytes of the device;
    torch's `allocated`, `peak`, `reserved`, number of `retries`, and `blocks`, the sizes in use.
    Empty if unknown. `held`: bytes by what they are for, as far as it is known."""
    if not stats:
        return ["torch has no statistics of this device's memory"]
    allocated, reserved = stats["allocated"], stats["reserved"]
    other = max(0, stats["total"] - stats["free"] - reserved)
    lines = [
        f"of {size_text(stats['total'])}, {size_text(stats['free'])} are free; torch holds {size_text(reserved)}, "
        f"CUDA, NCCL and other processes {size_text(other)}",
        f"tensors: {size_text(allocated)} at the end, {size_text(stats['peak'])} at the peak",
    ]
    if held:
        rest = max(0, stats["peak"] - sum(held.values()))
        parts = [f"{name} {size_text(size)}" for name, size in held.items()]
        lines[-1] += f": {', '.join(parts)}, everything else (activations, logits, gathered weights) {size_text(rest)}"
    if reserved - allocated > _FRAGMENTED * reserved:
        unused = size_text(reserved - allocated)
        lines.append(
            f"{unused} are reserved but in no tensor ({stats['retries']} retries): fragmented; "
            "PYTORCH_ALLOC_CONF=expandable_segments:True in resources.env may help"
        )
    if stats["blocks"]:
        largest = sorted(stats["blocks"], reverse=True)[:_BLOCKS]
        lines.append(f"largest blocks: {', '.join(size_text(size) for size in largest)}")
    return lines


def planned(decision: Decision, pp: int, stats: Mapping[str, Any]) -> list[str]:
    """Returns lines about what the plan says of this pipeline rank, and which changes would fit."""
    memory = decision.memory[pp].as_dict()
    total = memory.pop("total")
    flying = max(decision.in_flight[stage] for stage in decision.pipeline.stages_of_rank[pp])
    parts = [f"{name} {size_text(size)}" for name, size in memory.items() if size]
    each = (
        f"{size_text(memory.get('activations', 0) / max(1, flying))} of activations per microbatch, {flying} in flight"
    )
    lines = [f"planned: {size_text(total)}: {', '.join(parts)}; {each}"]
    if stats:
        capacity = stats["free"] + stats["reserved"]
        # It needed at least what there was. By how much more is unknown, so leave room.
        lines.append(changes_that_fit(decision.job, int(_ROOM * capacity), max(1.0, capacity / max(1, total))))
    return lines


def changes_that_fit(job: Job, capacity: int, factor: float = 1.0, patience_s: float = _SEARCH_S) -> str:
    """Returns the changes that fit as one sentence: what `planning.fit_search` answers. The search
    is no part of a rank. `factor`: what a rank was measured to need, relative to its plan."""
    question = {"job": job_document(job), "capacity": capacity, "factor": factor, "patience_s": patience_s}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "raypp.planning.fit_search"],
            input=json.dumps(question),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=patience_s + _START_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no search for changes that fit: %s %s", in_words(error), getattr(error, "stderr", None) or "")
        return "`raypp plan JOB --fit` searches for changes that fit"
    return done.stdout.strip()


def _allocator(index: int) -> dict[str, Any]:
    """Returns what `memory_lines` takes, from torch's allocator; empty if it does not answer."""
    try:
        free, total = torch.cuda.mem_get_info(index)
        stats = torch.cuda.memory_stats(index)
        blocks = [
            block["size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if segment["device"] == index
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
    except RuntimeError:  # after a CUDA error nothing on the device answers
        return {}
    return {
        "total": total,
        "free": free,
        "allocated": stats.get("allocated_bytes.all.current", 0),
        "peak": stats.get("allocated_bytes.all.peak", 0),
        "reserved": stats.get("reserved_bytes.all.current", 0),
        "retries": stats.get("num_alloc_retries", 0),
        "blocks": blocks,
    }


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes that this process has used: for tensors on a GPU, in all on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def alloc_retries(device: torch.device) -> int:
    """Returns how often this process' allocator found no room and gave back what it kept."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


def _held(stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    weights = [parameter for stage in stages for parameter in stage.parameters()]
    states = [] if optimizer is None else [v for state in optimizer.state.values() for v in state.values()]
    held = {
        "weights": _bytes(weights),
        "gradients": _bytes(weight.grad for weight in weights if weight.grad is not None),
        "optimizer state": _bytes(value for value in states if isinstance(value, Tensor)),
    }
    return {name: size for name, size in held.items() if size}


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of this rank's parts of tensors `[...]`, without those in host memory."""
    parts = [part for part in map(local_part, tensors) if not part.is_pinned()]
    return sum(part.numel() * part.element_size() for part in parts)
