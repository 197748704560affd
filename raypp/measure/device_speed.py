"""`python -m raypp.measure.device_speed`: the devices torch sees, and how fast they multiply.

Runs in a separate process, so that the caller need not import torch. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import torch

_LOOK_S = 0.3


def look() -> dict[str, Any]:
    """Returns versions, and each device's kind, capability, speed (FLOP/s; 0 if its memory is full)
    and memory."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": None, "devices": []}
    found |= {"driver": _driver(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            free, _ = torch.cuda.mem_get_info(index)
            try:
                flops = _flops(torch.device("cuda", index), torch.bfloat16, 8192)
            except torch.OutOfMemoryError:  # another process uses it
                torch.cuda.empty_cache()
                flops = 0.0
            device = {"kind": facts.name, "flops": flops, "memory": facts.total_memory, "free": free}
            found["devices"].append(device | {"capability": [facts.major, facts.minor]})
    else:
        torch.set_num_threads(1)
        found["cpu"] = {"kind": _cpu(), "flops": _flops(torch.device("cpu"), torch.float32, 512)}
    return found


def _driver() -> str | None:
    """Returns the version of NVIDIA's driver; None without one."""
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found[1] if found else None


def _flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    one = torch.randn(size, size, device=device, dtype=dtype)
    _finish(device, one @ one)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < _LOOK_S:
        _finish(device, one @ one)
        count += 1
    return 2.0 * size**3 * count / (time.perf_counter() - start)


def _finish(device: torch.device, _product: torch.Tensor) -> None:
    """Waits until the device has computed a product `[...]`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    print(json.dumps(look()))  # noqa: T201
