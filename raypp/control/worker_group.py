"""The processes of a run: kept from one attempt to the next, one per bundle, and an idle one per node beside them."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raypp.control.orphan import asks_every_s
from raypp.control.placement import Placement
from raypp.control.protocol import NAMESPACE, RunRequest, Standing
from raypp.control.report.relay_tree import RelayTree, Shape, actors_of, end_actor
from raypp.control.worker import Worker
from raypp.spec.job import Job

_FOUND_ANSWERS_S = 10.0

# Every device stays visible and each rank sets its own: one visible device per process cripples NCCL. Ray takes
# this variable out of a job's own settings, so it is given to the actors.
_ACTOR_ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
_THREADS = 16


@dataclass
class Member:
    """One worker process.

    Attributes:
        node_id: Of its node; empty until known.
        fresh: It was started for the present attempt.
    """

    actor: Any
    node_id: str
    fresh: bool = True


@dataclass
class Crew:
    """Every process of a run.

    A standby uses no resources of its own: when it takes the place of a dead process it uses that one's, which the
    placement group still holds.

    Args:
        controller: Handle the workers report to.
        device: cpu or cuda.
    """

    request: RunRequest
    job: Job
    controller: Any
    device: str
    seated: dict[int, Member] = field(default_factory=dict)
    """By bundle."""
    devices: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Node and device index of each bundle, as its first process there was told."""
    standbys: dict[str, Member] = field(default_factory=dict)
    """By node."""
    relays: RelayTree = field(init=False)

    def __post_init__(self) -> None:
        shape = Shape(**self.request.relays)
        self.relays = RelayTree(self.request.run, self.controller, self.job.recovery.orphan_timeout_s, shape)

    def staff(self, nodes: list[str], labels: list[str], attempt: int, placement: Placement) -> None:
        """Sees to it that every bundle has a process on its node: the one it had, else a standby, else a new one.

        Args:
            nodes: The node of each bundle.
            labels: The seat planned for each, for the name of a new actor; Ray's names cannot change later.
        """
        self.relays.staff(nodes)
        for bundle, node in enumerate(nodes):
            member = self.seated.get(bundle)
            if member is not None and member.node_id == node:
                member.fresh = False
                continue
            self.kill(bundle)
            if self.devices.get(bundle, (node, 0))[0] != node:
                del self.devices[bundle]
            self.fill(bundle, node, labels[bundle], attempt, placement)

    def fill(self, bundle: int, node: str, label: str, attempt: int, placement: Placement) -> None:
        """Gives a bundle without a process another one."""
        if node in self.standbys and (self.device == "cpu" or bundle in self.devices):
            self.seated[bundle] = self.standbys.pop(node)
            self.seated[bundle].fresh = False
            return
        suffix = f" (attempt {attempt})" if attempt > 1 else ""
        group = cast(PlacementGroup, placement.group)
        actor = self._start(
            f"{label}{suffix}",
            label,
            num_cpus=self.job.resources.cpus_per_rank,
            num_gpus=1 if self.device == "cuda" else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )
        self.seated[bundle] = Member(actor, node)

    def prepare_standbys(self) -> None:
        """Starts an idle process on every node of the run that has none."""
        if not self.job.recovery.standby:
            return
        for node in {member.node_id for member in self.seated.values()} - self.standbys.keys():
            name = f"standby-{secrets.token_hex(3)}"
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            self.standbys[node] = Member(self._start(name, "standby", num_cpus=0, scheduling_strategy=strategy), node)

    def add_standby(self, actor: Any, node: str) -> None:
        """Takes over an idle process that an earlier life of the controller started."""
        self.standbys[node] = Member(actor, node, fresh=False)

    def device_index(self, bundle: int, node: str, told: int) -> int:
        """The device of a bundle: a standby in it was told of none."""
        return self.devices.setdefault(bundle, (node, told))[1]

    def kill(self, bundle: int) -> None:
        """Ends the process of a bundle."""
        member = self.seated.pop(bundle, None)
        if member is not None:
            end_actor(member.actor)

    def kill_frozen(self, bundle: int, pid: int) -> None:
        """Ends a process that may not be able to end itself, with the help of another one on its node."""
        member = self.seated.get(bundle)
        self.kill(bundle)
        if member is None:
            return
        helper = self.helper(member.node_id)
        if helper is not None:
            helper.end_process.remote(pid)

    def helper(self, node_id: str, but: int | None = None) -> Any:
        """A process on a node that can look after another one there; None when there is none.

        Args:
            but: The bundle of the one to be looked after.
        """
        seated = [member for bundle, member in self.seated.items() if bundle != but]
        members = [*self.standbys.values(), *seated]
        return next((member.actor for member in members if member.node_id == node_id), None)

    def leave_bundles(self) -> None:
        """Ends every process that has one; the placement group is to be made anew elsewhere."""
        for bundle in list(self.seated):
            self.kill(bundle)
        self.devices.clear()

    def dismiss(self) -> None:
        """Ends every process."""
        for bundle in list(self.seated):
            self.kill(bundle)
        for member in self.standbys.values():
            end_actor(member.actor)
        self.standbys.clear()
        self.relays.dismiss()

    def _start(self, name: str, label: str, **options: Any) -> Any:
        # Ray would leave one thread to every actor, whatever CPUs it reserves for it.
        threads = {"OMP_NUM_THREADS": str(max(1, int(self.job.resources.cpus_per_rank)))}
        arguments = (
            self.request.run,
            label,
            threads | self.job.resources.env,
            self.controller,
            self.job.recovery.orphan_timeout_s,
            self.request.rank_function,
            asks_every_s(self.job.mesh.world),
        )
        return (
            ray.remote(Worker)
            .options(
                name=f"raypp/{self.request.run}/{name}",
                namespace=NAMESPACE,
                lifetime="detached",
                max_concurrency=_THREADS,
                max_restarts=0,
                runtime_env={"env_vars": _ACTOR_ENVIRONMENT},
                **options,
            )
            .remote(*arguments)
        )


def find_workers(run: str) -> list[tuple[Any, Standing]]:
    """The living workers of a run, whoever started them, with what they say. Those that say nothing are ended."""
    handles, _ = actors_of(run)
    asked = {handle.standing.remote(): handle for handle in handles}
    ready, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_FOUND_ANSWERS_S) if asked else ([], [])
    found = []
    for reference in ready:
        with contextlib.suppress(RayError):
            found.append((asked[reference], ray.get(reference)))
    for reference in silent:
        end_actor(asked[reference])
    return found


def end_workers(run: str, patience_s: float = 20.0) -> int:
    """Ends every worker and relay of a run, whoever started it, and waits until they are gone; returns how many workers
    there were."""
    workers, relays = actors_of(run)
    waiting = [worker.outcome.remote(-1, 600.0) for worker in workers]  # answers by failing, when the process is gone
    waiting += [relay.stay.remote() for relay in relays]
    for handle in (*workers, *relays):
        end_actor(handle)
    if waiting:
        ray.wait(waiting, num_returns=len(waiting), timeout=patience_s)
    return len(workers)
