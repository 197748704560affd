"""`python -m raypp.tools.doctor.device_speed`: the devices torch sees, and how fast they multiply.
Runs in a separate process, so that the caller need not import torch. Prints one JSON object."""

import ctypes
import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import torch

from raypp.rank.device_check import card_of, has_kernels_for, why_no_card
from raypp.rank.joining.cuda_settings import prepare_driver

_LOOK_S = 0.3
_KERNEL_EXEC_TIMEOUT = 17  # the driver's number of that attribute


def look() -> dict[str, Any]:
    """Returns versions, and what is known of each device. Its kind, capability, speed (FLOP/s; 0 if
    its memory is full or torch has no kernels for it), memory, place on the PCI bus, and whether
    the driver ends long kernels. Without a device, `why`."""
    prepare_driver()
    answer: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": None, "devices": []}
    answer |= {"driver": _driver(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    if torch.cuda.is_available():
        answer["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            card = card_of(index)
            free, _ = torch.cuda.mem_get_info(index)
            supported = has_kernels_for(card.capability, torch.cuda.get_arch_list())
            try:
                flops = _flops(torch.device("cuda", index), torch.bfloat16, 8192) if supported else 0.0
            except torch.OutOfMemoryError:  # another process uses it
                torch.cuda.empty_cache()
                flops = 0.0
            device = {"kind": card.name, "flops": flops, "memory": card.memory, "free": free, "bus": card.bus}
            device |= {"supported": supported, "time_limit": kernel_time_limit(index)}
            answer["devices"].append(device | {"capability": list(card.capability)})
    else:
        torch.set_num_threads(1)
        answer["why"] = why_no_card()
        answer["cpu"] = {"kind": _cpu(), "flops": _flops(torch.device("cpu"), torch.float32, 512)}
    return answer


def kernel_time_limit(index: int, library: str = "libcuda.so.1") -> bool | None:
    """Returns whether the driver ends kernels that run for seconds, as it does on a card with a
    display. NCCL's kernels run for as long as they wait for another rank. `index`: the device's
    number in this process. Returns None if the driver does not answer."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return None
    failed = driver.cuDeviceGetAttribute(ctypes.byref(value), _KERNEL_EXEC_TIMEOUT, device)
    return None if failed else bool(value.value)


def _driver() -> str | None:
    try:
        match = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return match[1] if match else None


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
