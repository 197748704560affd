"""Settings of CUDA for a process: allocator, queues, CPUs, precision of products in fp32."""

import os
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

import torch

from raypp.job.job import TrainSection
from raypp.job.precision import FP32
from raypp.records import Event, Seat
from raypp.torch_private import inductor_config, set_allocator

# torch 2.11 and 2.13 read both; the second is the older name.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ALLOCATOR = "expandable_segments:True"
_PLAIN_ALLOCATOR = "expandable_segments:False"
_REFUSED = "not supported"
_QUEUES = "32"
_COMPILE_THREADS = 32
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def prepare_allocator(environment: MutableMapping[str, str] = os.environ) -> str:
    """Chooses expandable segments unless the user configures torch's allocator. Microbatches of
    changing lengths fragment segments of a fixed size. Call it before the process uses CUDA: the
    allocator reads its settings once. Returns the setting in effect, as `NAME=value`."""
    name = next((name for name in ALLOCATOR_VARIABLES if name in environment), ALLOCATOR_VARIABLES[0])
    return f"{name}={environment.setdefault(name, _ALLOCATOR)}"


def check_allocator(
    allocator: str,
    allocate: Callable[[], object],
    turn_off: Callable[[str], None] = set_allocator,
    environment: MutableMapping[str, str] = os.environ,
) -> str:
    """Turns expandable segments off where platform or driver refuses them, as of a vGPU. What the
    user configures stays. Returns the setting in effect, and why if it is another."""
    name, _, value = allocator.partition("=")
    if value != _ALLOCATOR:
        return allocator
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            allocate()
        except RuntimeError as error:
            if _REFUSED not in str(error):
                raise
            reason = str(error).splitlines()[0]
        else:
            reason = next((str(one.message) for one in told if _REFUSED in str(one.message)), "")
    if not reason:
        return allocator
    environment[name] = _PLAIN_ALLOCATOR
    turn_off(_PLAIN_ALLOCATOR)
    return f"{name}={_PLAIN_ALLOCATOR}, as expandable segments are refused here ({reason})"


def prepare_driver(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what the driver reads when it starts, and never again, unless the user sets it. The most
    hardware queues that a GPU has: streams that share a queue wait for each other's heads, and a
    receive that is posted early must not stop the compute, or the send that its peer waits for. And
    the order of nvidia-smi and Ray, where CUDA would number the fastest card 0. Call it before the
    process asks CUDA for anything, even whether there is a device."""
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _QUEUES)
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def share_compile_threads(ranks: int, environment: Mapping[str, str] = os.environ) -> None:
    """Gives a rank its share of the node's cores to compile with, unless the user sets a number.
    torch would start a process for each core, up to 32, in every rank."""
    if "TORCHINDUCTOR_COMPILE_THREADS" not in environment:
        inductor_config().compile_threads = max(1, min(_COMPILE_THREADS, len(os.sched_getaffinity(0)) // ranks))


def bind_near(bus: str, devices: Path = _PCI_DEVICES) -> str:
    """Binds this thread, and those that it starts from now on, to the CPUs next to a card.

    What they allocate then lies in that part of the host's memory. Never adds a CPU to those that
    user, Slurm or container allow. Ranks whose cards are next to the same CPUs share all of them.
    `bus`: the card's place on the PCI bus, as sysfs names it. `devices`: the folder of sysfs that
    has one for each PCI device. Returns the CPUs in words; "" if all stay: the kernel lists none,
    or of those that are allowed it lists none or all.
    """
    try:
        listed = (devices / bus / "local_cpulist").read_text().strip()
        allowed = os.sched_getaffinity(0)
        near = allowed & listed_cpus(listed)
        if not near or near == allowed:
            return ""
        os.sched_setaffinity(0, near)
    except (OSError, ValueError):
        return ""
    return f"{len(near)} of its {len(allowed)} CPUs, those next to the card ({listed})"


def listed_cpus(listed: str) -> set[int]:
    """Returns the CPUs of a list as the kernel writes it, such as `0-15,64-79`."""
    ranges = [part.split("-") for part in listed.split(",")]
    return {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)}


def set_product_precision(*, tf32: bool) -> None:
    """Sets how CUDA multiplies matrices in fp32."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


def cuda_event(
    train: TrainSection, seat: Seat, allocator: str, device: str, unfused: str | None, cpus: str = ""
) -> Event:
    """Returns the `cuda` event for the run's records: device, versions, precision, allocator, CPUs.
    `unfused`: why Triton's kernels do not run; None: they do."""
    precision, compute = train.precision, train.dtypes.compute
    products = "tf32" if compute is FP32 and train.tf32 else compute.name
    words = f"{device}, torch {torch.__version__}: precision {precision}, products in {products}; {allocator}"
    if cpus:
        words += f"; {cpus}"
    if unfused is not None:
        words += "; AdamW by rows and quantised weights use torch's slower kernels, with the same bits, and the "
        words += f"loss is slower and takes more memory than planned: {unfused}"
    return seat.event(
        "cuda",
        words,
        device=device,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        precision=precision,
        products=products,
        allocator=allocator,
        cpus=cpus,
        kernels="triton" if unfused is None else "torch",
    )
