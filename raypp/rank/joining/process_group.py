"""Joins an attempt from a seat: rendezvous, process group, device."""

import ctypes
import errno
import ipaddress
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from raypp.errors import Problem, UnreachableError
from raypp.rank.joining.abort import abort_groups, cut_connections, cut_since
from raypp.rank.joining.network import prepare_network
from raypp.rank.joining.preflight import check_links, links_in_words, wait_for_master
from raypp.records import Event, EventKind, Seat
from raypp.stages.parallel.rank_groups import before_join, few_ctas, urgent
from raypp.torch_private import backends_on, restart_group_names, set_operation_timeout
from raypp.untrusted.sockets import SignedKeys

log = logging.getLogger(__name__)

# The first step may compile and connect. A dead peer is noticed by its closed connections.
_STARTUP_S = 300.0
# A GPU's host queues a whole step at once, so an operation of NCCL lasts as long as its step. One
# of gloo may wait as long for a rank that is at another part of it.
_STEP_S = 3600.0
_CONNECT_S = 2.0
_NAME_S = 10.0
_JOIN_S = 2.0
_LEAVE_S = 30.0
_BACKLOG = 2048
_DESCRIPTORS = 65_536
_ASK_EVERY_S, _ASK_SELDOM_S = 0.02, 0.3


def pick_device(seat: Seat) -> torch.device:
    """Returns the seat's device and makes it current. A CPU rank computes with OMP_NUM_THREADS
    threads (default 1) and keeps the memory it frees."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    if seat.device == "cuda":
        torch.cuda.set_device(seat.device_index)
        return torch.device("cuda", seat.device_index)
    keep_freed_memory()
    return torch.device("cpu")


def allow_long_steps(device: torch.device, hang_timeout_s: float) -> None:
    """Gives operations at least an hour, in all groups that this process has now.

    NCCL counts from when the host queues an operation, and the host queues a step within moments.
    An operation of gloo may wait for a rank that is at another part of a long step. With torch's 10
    minutes for groups that have options, 30 minutes for others, and `joined`'s 5 minutes for the
    world, a longer step would be aborted. `control.hang_watch` notices a hang earlier, because it
    knows how long steps take. `hang_timeout_s`: another limit, if it is higher.
    """
    timeout = timedelta(seconds=max(_STEP_S, hang_timeout_s))
    for kind in {torch.device("cpu"), device}:
        for backend in backends_on(kind):
            set_operation_timeout(backend, timeout)


def connect(address: str, port: int, world: int, *, serve: bool, timeout_s: float = _STARTUP_S) -> TCPStore:
    """Connects to the key-value store the ranks meet at. `serve`: whether this process serves it,
    unless torchrun's agent does. `timeout_s`: the store's timeout, and how long to wait for its
    server. Raises UnreachableError: another process has taken the port since it was chosen."""
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serve = serve and not agent_serves
    timeout = timedelta(seconds=timeout_s)
    if not serve:
        return _join_store(address, port, world, timeout)
    # The constructor does not wait for other ranks: there, a cut connection would not unblock it.
    try:
        listening = _listening(address, port)
        return TCPStore(
            address, port, world, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening
        )
    except (OSError, dist.DistNetworkError) as error:
        if getattr(error, "errno", None) != errno.EADDRINUSE and "EADDRINUSE" not in str(error):
            raise
        what = f"another process has taken port {port} of {address}, where the ranks were to meet, since it was chosen"
        fix = "the next attempt chooses another; under torchrun, set another --master-port"
        raise UnreachableError(Problem("rendezvous", what, fix)) from error


def _join_store(address: str, port: int, world: int, timeout: timedelta) -> TCPStore:
    """Connects to the store that rank 0 serves. If the server goes meanwhile, TCPStore tries until
    its timeout, whatever is cut. So it gets little time, again and again."""
    began = time.monotonic()
    while True:
        left_s = timeout.total_seconds() - (time.monotonic() - began)
        _wait_for_server(address, port, left_s)
        short = timedelta(seconds=max(0.1, min(_JOIN_S, left_s)))
        try:
            store = TCPStore(address, port, world, is_master=False, timeout=short, wait_for_workers=False)
        except dist.DistError as error:
            if cut_since(port, began) or time.monotonic() - began > timeout.total_seconds():
                raise dist.DistNetworkError(f"no rank 0 at {address}:{port}: {error}") from error
        else:
            store.set_timeout(timeout)
            return store


def _listening(address: str, port: int) -> int | None:
    """Returns the descriptor of a socket that listens on this address only. None lets torch listen
    on all addresses: for a host name, which may mean another address on the other nodes, and for an
    address that this machine does not have itself (behind NAT)."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        if address != "localhost":
            return None
        address, family = "127.0.0.1", socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG).detach()
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        log.warning("this machine does not have the address %s: the rendezvous listens on all addresses", address)
        return None


def _wait_for_server(address: str, port: int, timeout_s: float) -> None:
    """Waits until the store's server listens, or, unlike TCPStore, the attempt is aborted."""
    began, pause_s = time.monotonic(), _ASK_EVERY_S
    while True:
        try:
            with socket.create_connection((address, port), timeout=_CONNECT_S) as one:
                if one.getsockname() != one.getpeername():  # a connection from a port to itself needs no server
                    return
        except OSError as error:
            if isinstance(error, socket.gaierror) and time.monotonic() - began > _NAME_S:
                what = f"{address!r}, the name of rank 0's machine, does not resolve here: {error.strerror}"
                fix = "give torchrun each machine's address (--local-addr ADDRESS), or add the name to /etc/hosts"
                raise UnreachableError(Problem("rendezvous", what, fix)) from error
            if cut_since(port, began) or time.monotonic() - began > timeout_s:
                raise dist.DistNetworkError(f"no rank 0 at {address}:{port}: {error}") from error
        time.sleep(pause_s)
        pause_s = min(_ASK_SELDOM_S, 1.5 * pause_s)  # each try briefly takes a port, which could be the server's


def _allow_descriptors() -> None:
    """Lets this process open as many files and connections as Ray lets its workers open: gloo keeps
    those from other programs open, and ends the process when it can accept no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _world_options(seat: Seat) -> Any:
    """Returns NCCL's options for the group of all ranks: one thread block, as its sums are small.
    None, the default, on CPUs, and where replicas span all ranks: torch's meshes take the group of
    all ranks for an axis that does. For the same reason, it has FSDP's options where FSDP does."""
    sizes = seat.mesh_sizes
    if seat.device != "cuda" or seat.world_size == sizes.dp_replicate:
        return None
    return urgent() if seat.world_size == sizes.shards else few_ctas(1)


@contextmanager
def joined(
    seat: Seat,
    hang_timeout_s: float,
    store: TCPStore | None = None,
    tell: Callable[[Event], None] = lambda _event: None,
) -> Iterator[TCPStore]:
    """Joins the attempt's process group, and leaves it at the end. Collective over the world.

    An exception aborts all groups before they are destroyed.

    CPU tensors always use gloo, also with NCCL: the ranks agree on each step without the device.
    `hang_timeout_s`: maximum duration of a collective until `allow_long_steps`, if it is more than
    5 minutes. `store`: the store the ranks meet at. None: rank 0 serves one at the seat's address.
    Yields the store the ranks met at. Raises UnreachableError: two nodes cannot reach each other;
    names the nodes, interfaces and fix.
    """
    chosen, lines = prepare_network(seat)
    for line in lines:
        log.info("rank %d: %s", seat.rank, line)
    backend = "cpu:gloo,cuda:nccl" if seat.device == "cuda" else "gloo"
    timeout_s = max(_STARTUP_S, hang_timeout_s)
    if store is None:
        if seat.node != seat.master_addr and seat.nodes:
            wait_for_master(seat, chosen)
        store = connect(seat.master_addr, seat.master_port, seat.world_size, serve=seat.rank == 0, timeout_s=timeout_s)
    attempt_store = PrefixStore(f"{seat.run}/attempt-{seat.attempt}", store)

    def tell_here(kind: EventKind, message: str) -> None:
        tell(seat.event(kind, message))

    signed = SignedKeys(attempt_store, seat.secret)
    if reports := check_links(seat, chosen, signed, tell=partial(tell_here, "refused_connection")):
        tell_here("network", links_in_words(chosen, reports))
    # After a join that failed half-way this process would use group names that new ones do not.
    restart_group_names()
    before_join()
    _allow_descriptors()
    dist.init_process_group(
        backend,
        store=attempt_store,
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timedelta(seconds=timeout_s),
        pg_options=_world_options(seat),
    )
    log.info(
        "rank %d of %d (%s) joined by %s at %s:%d over %s",
        seat.rank, seat.world_size, seat.label, backend, seat.master_addr, seat.master_port,
        os.environ.get("GLOO_SOCKET_IFNAME", "the default interface"),
    )  # fmt: skip
    try:
        yield store
    except BaseException:
        # NCCL's destroy waits for its kernels, and these for peers that may be gone.
        if abort_groups():
            try:
                dist.destroy_process_group()
            except Exception as error:  # noqa: BLE001 - must not hide what failed first
                log.warning("aborted process groups were not destroyed: %s", error)
        raise
    dist.destroy_process_group()


def leave_together(seat: Seat) -> None:
    """Waits until all ranks have read what others said by the store. Collective over the world. The
    store's server ends with the rank, or with the agent of torchrun, that serves it. The wait ends
    when a rank is gone or this one is told to leave, and for a frozen one after half a minute."""
    try:
        dist.all_reduce(torch.zeros(1), async_op=True).wait(timedelta(seconds=_LEAVE_S))
    except Exception as error:  # noqa: BLE001 - this rank has come to its end, which they do not change
        log.debug("rank %d does not wait for the others: %s", seat.rank, error)
        cut_connections(seat.master_port)  # else the groups' end would wait for a frozen rank
        abort_groups()


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST = 2**31 - 1  # mallopt takes an int
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Makes this process keep the memory it frees, at most its peak, for the next microbatch. glibc
    returns large free blocks to the system at once, and the next microbatch faults them in again,
    page by page: 4 % of the time of a last stage (docs/benchmarks). Does nothing if the user
    configures glibc's allocator by its environment variables, or if the process uses another
    allocator. Returns whether the setting was applied."""
    chosen = any(name in environment for name in _SETTINGS)
    if chosen or "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, _MOST) == 1 for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
