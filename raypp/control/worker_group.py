"""The processes of a run: one per bundle and one standby per node, kept between attempts."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypp.control.cleanup import end_actor
from raypp.control.fork_client import EXECUTABLE
from raypp.control.placement import Placement
from raypp.control.protocol import NAMESPACE, RunRequest, forks_workers
from raypp.control.worker import Worker, ask_interval_s
from raypp.job.job import Job

# Every device stays visible and each rank sets its own: one visible device per process cripples
# NCCL. Ray removes this variable from a job's own settings, so it is set per actor.
ACTOR_ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
_THREADS = 16


@dataclass
class Member:
    """One worker process. `fresh`: it was started for the current attempt."""

    actor: Any
    node_id: str
    fresh: bool = True


@dataclass
class WorkerGroup:
    """Every process of a run. `device`: cpu or cuda.

    A standby reserves no resources: when it replaces a dead process it uses that one's, which the
    placement group still holds. Whether it lives is seen when it gets a bundle: one that has died
    is replaced like any process of an earlier attempt.
    """

    request: RunRequest
    job: Job
    controller: Any
    device: str
    seated: dict[int, Member] = field(default_factory=dict)
    """By bundle."""
    devices: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Node and device index of each bundle, as Ray gave them to the first process there."""
    standbys: dict[str, Any] = field(default_factory=dict)
    """By node."""

    def fill(self, nodes: list[str], labels: list[str], attempt: int, placement: Placement) -> None:
        """Gives every bundle a process on its node: the one it had, else a standby, else a new one.
        `nodes`: the node of each bundle. `labels`: the seat planned for each, for the name of a new
        actor; Ray's names cannot change later."""
        for bundle, node in enumerate(nodes):
            member = self.seated.get(bundle)
            if member is not None and member.node_id == node:
                member.fresh = False
                continue
            self.kill(bundle)
            if self.devices.get(bundle, (node, 0))[0] != node:
                del self.devices[bundle]
            self.fill_bundle(bundle, node, labels[bundle], attempt, placement)

    def fill_bundle(self, bundle: int, node: str, label: str, attempt: int, placement: Placement) -> None:
        """Gives a process to a bundle that has none."""
        if node in self.standbys and (self.device == "cpu" or bundle in self.devices):
            self.seated[bundle] = Member(self.standbys.pop(node), node, fresh=False)
            return
        suffix = f" (attempt {attempt})" if attempt > 1 else ""
        actor = self._start(f"{label}{suffix}", label, **placement.options(bundle))
        self.seated[bundle] = Member(actor, node)

    def start_standbys(self, next_nodes: Collection[str] = ()) -> None:
        """Starts a standby on every node of the run that has none. `next_nodes`: others that get
        one: a rank that moves there finds everything imported."""
        if not self.job.recovery.standby:
            return
        nodes = {member.node_id for member in self.seated.values()}.union(next_nodes)
        for node in self.standbys.keys() - nodes:
            end_actor(self.standbys.pop(node))
        for node in nodes - self.standbys.keys():
            name = f"standby-{secrets.token_hex(3)}"
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            self.standbys[node] = self._start(name, "standby", num_cpus=0, scheduling_strategy=strategy)

    def device_index(self, bundle: int, node: str, reported: int) -> int:
        """Returns the device of a bundle, which Ray does not tell a standby in it."""
        return self.devices.setdefault(bundle, (node, reported))[1]

    def kill(self, bundle: int) -> None:
        member = self.seated.pop(bundle, None)
        if member is not None:
            end_actor(member.actor)

    def kill_frozen(self, bundle: int, pid: int) -> None:
        """Ends a process that may not react to Ray, by the other workers on its node."""
        member = self.seated.get(bundle)
        self.kill(bundle)
        if member is None:
            return
        for helper in self.helpers(member.node_id):
            helper.end_process.remote(pid)

    def helpers(self, node_id: str, except_bundle: int | None = None) -> list[Any]:
        """Returns the workers of a node that can examine or end another one there. Some may be dead
        or frozen themselves. `except_bundle`: the bundle of the worker to be examined."""
        standby = [self.standbys[node_id]] if node_id in self.standbys else []
        others = [one for bundle, one in self.seated.items() if bundle != except_bundle]
        return standby + [one.actor for one in others if one.node_id == node_id]

    def empty_bundles(self) -> None:
        """Ends every process that has a bundle, before the placement group is made anew."""
        for bundle in list(self.seated):
            self.kill(bundle)
        self.devices.clear()

    def _start(self, name: str, label: str, **options: Any) -> Any:
        forked = {"py_executable": EXECUTABLE} if forks_workers(self.request) else {}
        return (
            ray.remote(Worker)
            .options(
                name=f"raypp/{self.request.cluster_name}/{name}",
                namespace=NAMESPACE,
                lifetime="detached",
                max_concurrency=_THREADS,
                max_restarts=0,
                runtime_env={"env_vars": ACTOR_ENVIRONMENT} | forked,
                **options,
            )
            .remote(self.request, label, self.controller, ask_interval_s(self.job.mesh.world))
        )
