"""Where a worker process runs."""

from __future__ import annotations

import os
import socket

import ray

from raypp.control import process_evidence
from raypp.control.protocol import WorkerInfo
from raypp.control.visible_devices import device_position
from raypp.ports import free_port
from raypp.records import NodeFacts
from raypp.train.network import interface_with


def worker_info() -> WorkerInfo:
    """Returns where this actor's process runs, and a port of its node that is free now."""
    context = ray.get_runtime_context()
    ip = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    devices = context.get_accelerator_ids().get("GPU", [])
    facts = NodeFacts(
        node_id=context.get_node_id(),
        ip=ip,
        hostname=socket.gethostname(),
        pid=os.getpid(),
        interface=interface_with(ip).name,
        device_index=device_position(str(devices[0]), os.environ.get("CUDA_VISIBLE_DEVICES")) if devices else 0,
    )
    return WorkerInfo(facts, free_port(ip), process_evidence.log_path(), process_evidence.oom_kills())
