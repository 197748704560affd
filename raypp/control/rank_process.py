"""A worker process: where it runs, its device, and its set-up for a seat."""

import contextlib
import importlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import ray

from raypp.control import process_evidence
from raypp.control.protocol import WorkerInfo
from raypp.environment import NCCL_OF_TORCH, c_compiler
from raypp.errors import Problem, ResourcesError
from raypp.ports import free_port
from raypp.rank.joining.network import interface_with, network_gbps
from raypp.records import NodeFacts, Seat

log = logging.getLogger("raypp")
_VARIABLE = "CUDA_VISIBLE_DEVICES"


def set_seat_environment(seat: Seat) -> None:
    """Sets the variables that torchrun sets, starts logging, and logs the seat."""
    environment = {
        "RANK": seat.rank,
        "WORLD_SIZE": seat.world_size,
        "LOCAL_RANK": seat.local_rank,
        "LOCAL_WORLD_SIZE": seat.local_world_size,
        "GROUP_RANK": seat.node_rank,
        "MASTER_ADDR": seat.master_addr,
        "MASTER_PORT": seat.master_port,
    }
    os.environ.update({key: str(value) for key, value in environment.items()})
    for key, setting in NCCL_OF_TORCH.items():
        os.environ.setdefault(key, setting)  # the job's resources.env may say otherwise
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
    log.setLevel(logging.INFO)
    log.info(
        "rank %d of %d is %s on %s, pid %d, device %s:%d, %s threads, attempt %d",
        seat.rank, seat.world_size, seat.label, seat.node, os.getpid(), seat.device, seat.device_index,
        os.environ.get("OMP_NUM_THREADS"), seat.attempt,
    )  # fmt: skip


@contextlib.contextmanager
def process_title(title: str) -> Iterator[None]:
    """Holds the process title. Ray would set its own around every method call."""
    module: Any = importlib.import_module("ray._raylet")
    set_title = module.setproctitle
    set_title(title)
    module.setproctitle = lambda _title: None
    try:
        yield
    finally:
        module.setproctitle = set_title


def on_sigterm(save: Callable[[], bool]) -> None:
    """Installs a SIGTERM handler: clouds and operators announce with it that a machine is about to
    end. `save`: called on SIGTERM; returns whether a rank is running, which then saves and leaves.
    Otherwise the handler that was there before (Ray's) runs."""
    try:
        before = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: FrameType | None) -> None:
            if save():
                return
            if callable(before):
                before(number, frame)
            else:
                os._exit(128 + number)

        signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not in the main thread: Ray's own handler stays
        log.warning("rank processes end at once on SIGTERM here")


def worker_info() -> WorkerInfo:
    """Returns where this actor's process runs, and a port of its node that is free now."""
    context = ray.get_runtime_context()
    ip = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    devices, interface = context.get_accelerator_ids().get("GPU", []), interface_with(ip)
    facts = NodeFacts(
        node_id=context.get_node_id(),
        ip=ip,
        hostname=socket.gethostname(),
        pid=os.getpid(),
        interface=interface.name,
        device_index=device_position(str(devices[0]), os.environ.get(_VARIABLE)) if devices else 0,
        compiler=c_compiler() is not None,
        network_gbps=network_gbps(interface.mbps),
    )
    return WorkerInfo(facts, free_port(ip), process_evidence.log_path(), process_evidence.oom_kills())


def device_position(assigned: str, visible: str | None) -> int:
    """Returns the index by which this process names a device: `cuda:INDEX`.

    Ray assigns devices by the entries of the raylet's CUDA_VISIBLE_DEVICES, and CUDA counts the
    devices of that list from 0. `assigned`: Ray's id of the device: an index of the machine, or a
    UUID (`GPU-…`, `MIG-…`). `visible`: CUDA_VISIBLE_DEVICES of this process; None if it is not set.
    Raises ResourcesError: the process cannot see the device.
    """
    assigned = assigned.strip()
    if visible is None:
        if assigned.isdecimal():
            return int(assigned)
        raise _refused(f"Ray assigned device {assigned!r}, but {_VARIABLE} is not set", "list the devices in it")
    entries = [entry.strip() for entry in visible.split(",")]
    variable = f"{_VARIABLE}={visible!r}"
    if entries == [""]:
        raise _refused(f"{_VARIABLE} is empty, so no device is visible", "unset it, or list devices in it")
    repeated = next((entry for entry in entries if entries.count(entry) > 1), None)
    if repeated is not None:
        raise _refused(f"{variable} names {repeated} twice, so CUDA shows no device", "name every device once")
    ended = next((index for index, entry in enumerate(entries) if not _valid(entry, entries[0])), len(entries))
    positions = [index for index, entry in enumerate(entries) if _same(entry, assigned)]
    if not positions:
        fault = f"Ray assigned device {assigned}, which {variable} does not contain"
        raise _refused(fault, "set the same list for Ray and the job")
    if positions[0] >= ended:
        fault = f"CUDA ignores {variable} from {entries[ended]!r} on, and with it device {assigned}, which Ray assigned"
        raise _refused(fault, "list indices only, or UUIDs of one kind only (GPU- or MIG-)")
    if positions[0] and assigned.startswith("MIG-"):
        fault = f"CUDA shows a process only the first MIG instance of {variable}, and Ray assigned {assigned}"
        raise _refused(fault, "list one MIG instance; NCCL cannot join several instances of one GPU")
    return positions[0]


def _valid(entry: str, first: str) -> bool:
    """Whether CUDA reads on at this entry: the kind of the first one decides."""
    for kind in ("GPU-", "MIG-"):
        if first.startswith(kind):
            return entry.startswith(kind)
    return entry.isdecimal()


def _same(entry: str, assigned: str) -> bool:
    """Whether two ids name one device. A UUID may be shortened to a prefix."""
    if entry.isdecimal() or assigned.isdecimal():
        return entry.isdecimal() and assigned.isdecimal() and int(entry) == int(assigned)
    return bool(entry) and (entry.startswith(assigned) or assigned.startswith(entry))


def _refused(fault: str, fix: str) -> ResourcesError:
    return ResourcesError(Problem("resources.device", fault, f"{fix} (in the environment of `ray start`)"))
