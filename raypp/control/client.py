"""Submits runs to a cluster, and sends commands to their controllers."""

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from raypp.control.cluster_call import Call, ask, python_of, refused
from raypp.control.clusters.dashboard import DashboardError, NodeResources
from raypp.control.clusters.find import Cluster
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.credentials import PROFILE, SECRETS, SETTINGS, collect, deposit
from raypp.control.fork_client import BESIDE_SERVER
from raypp.control.package import build_package
from raypp.control.protocol import RunRequest, forks_workers
from raypp.control.queue.line import Priority
from raypp.control.reshape import best_for, reshaped
from raypp.errors import JobError, Problem, ResourcesError, size_text
from raypp.job.availability import own_files
from raypp.job.job import Job
from raypp.job.load import job_document
from raypp.job.precision import DtypeName
from raypp.job.secret import secrets_of, without_secrets
from raypp.job.small_files import FOLDER
from raypp.job.trackers import missing_for_trackers, tracker_variables
from raypp.kinds import STORES
from raypp.planning.decide import ON_CPUS, fp16_remark, settle
from raypp.planning.decision import Facts
from raypp.planning.fit_search import memory_problems
from raypp.planning.geometry import Mesh, shapes
from raypp.planning.host_memory import offload_problems
from raypp.planning.seating import keep_groups_inside
from raypp.records import RunState
from raypp.registry import load_object
from raypp.state.checkpoint.run_spec import read_end
from raypp.storage import ObjectStore
from raypp.untrusted.text import shell_word

_COMMAND_PATIENCE_S = 180.0
_BEFORE_AMPERE = re.compile(
    r"Tesla|Quadro|TITAN|GTX|MX\d|RTX 20[678]0|\b([KMP]\d0|P4|P100|V100S?|T4G?|T[46]00|T1[02]00)\b"
)
"""Names of NVIDIA's cards of compute capability below 8.0, which have no bf16."""
_SINCE_VOLTA = re.compile(r"RTX|TITAN V|GTX 16|Quadro T|\b(V100S?|T4G?|T[46]00|T1[02]00)\b")
"""Those of them that have fast products in fp16."""

Waiting = Callable[[], None]
"""Called once if an answer takes longer than a minute."""


def check_resources(job: Job, cluster: Cluster, *, idle: bool = False) -> tuple[Facts, Job]:
    """Returns what decisions take into account of the cluster, when enough devices are free, and
    the job with what is decided for the life of its run. `idle`: as if no other run were there.
    Raises UnreachableError: The cluster does not answer. Raises ResourcesError: There are fewer
    free devices than ranks; names the free ones and a mesh that fits. Or a node has too few for a
    tp group. Or a rank needs more memory than the largest GPU has; names changes that fit. Or the
    nodes' memory is too small for what the job offloads."""
    nodes = cluster.dashboard.nodes()
    if idle:
        nodes = [replace(node, free_cpus=node.cpus, free_gpus=node.gpus) for node in nodes]
    facts = facts_of(device_for(job, nodes, embedded=cluster.embedded is not None, idle=idle), nodes)
    return facts, settle(job, facts)


def facts_of(device: str, nodes: Sequence[NodeResources]) -> Facts:
    """Returns what a decision takes into account of these nodes. A card with an unknown name is
    taken to have bf16; if it has not, its rank refuses the job."""
    if device == "cpu":
        return ON_CPUS
    used = [node for node in nodes if node.gpus >= 1]
    names = [name for node in used for name in node.gpu_names or ("",)]
    gpus, cards = tuple(int(node.gpus) for node in used), tuple(names)
    return Facts("cuda", gpus=gpus, cards=cards, memory=_smallest_gpu(nodes), precision=_auto_on(names))


def _auto_on(cards: Sequence[str]) -> DtypeName:
    """Returns what `train.precision: auto` is on cards of these names."""
    old = [name for name in cards if _BEFORE_AMPERE.search(name)]
    return ("fp16" if all(map(_SINCE_VOLTA.search, old)) else "fp32") if old else "bf16"


def check_trackers(job: Job, cluster: Cluster) -> None:
    """Checks that the job's trackers have what they need, as far as this machine can know. Raises
    JobError: one lacks its key or its address. On the embedded cluster also: its library."""
    embedded = cluster.embedded
    here = embedded is not None and embedded.python == sys.executable
    if problems := missing_for_trackers(job, os.environ, here=here):
        raise JobError(problems)


def device_for(
    job: Job, nodes: Sequence[NodeResources], *, embedded: bool = False, training: bool = True, idle: bool = False
) -> str:
    """Returns the device of `check_resources`, for the nodes of a cluster. `embedded`: whether
    `raypp local up` started the cluster. `training`: whether the job is trained. If not, its memory
    is not checked. `idle`: whether what is free is all that the nodes have."""
    world, cpus = job.mesh.world, job.resources.cpus_per_rank
    device, elastic = job.resources.device, job.recovery.elastic_options
    if device == "auto":
        least = elastic.min_ranks if elastic else world
        device = "cuda" if sum(node.gpus for node in nodes) >= least else "cpu"
    job = settle(job, facts_of(device, nodes))
    free = {node.node_id: _places(node, device, cpus) for node in nodes}
    total = sum(free.values())
    if total >= world and not training:
        return device
    smallest = _smallest_gpu(nodes) if device == "cuda" else 0
    if total >= world and job.mesh.tp > 1:
        keep_groups_inside(Mesh.of(job.mesh), [(node.ip, free[node.node_id]) for node in nodes])
    if total >= world or best_for(job, total, smallest) is not None:
        largest = max((node.gpu_bytes for node in nodes if free[node.node_id]), default=0)
        memory = {node.ip: node.free_bytes for node in nodes if free[node.node_id]}
        mesh = best_for(job, world)
        whole = reshaped(job, mesh) if mesh else job
        if device == "cuda" and largest and (problems := memory_problems(whole, largest, memory)):
            raise ResourcesError(problems)
        if problems := offload_problems(whole, memory, "cuda" if device == "cuda" else "cpu"):
            raise ResourcesError(problems)
        return device
    units = "GPUs" if device == "cuda" else f"places of {cpus:g} CPU"
    if any(_lacks_cpus(node, free[node.node_id], device) for node in nodes):
        units = f"GPUs with {cpus:g} CPUs each"
    where = ", ".join(_places_in_words(node, free[node.node_id], device, cpus) for node in nodes)
    free_gpus = sum(int(node.free_gpus) for node in nodes)
    too_large = best_for(job, total) is not None  # an elastic job, whose smaller meshes need too much memory
    ended = "" if idle else "end another run, or "
    fix = f"{ended}add nodes" if too_large else _way_out(job, total, device, embedded, free_gpus, ended)
    why = f"; on fewer, ranks are planned to need more memory than a GPU has ({size_text(smallest)})"
    fault = f"{world} ranks need {world} {units}; {total} are {'there' if idle else 'free'}"
    fault += f" ({where or 'the cluster has no node'})" + (why if too_large else "")
    raise ResourcesError(Problem("mesh", fault, fix))


def precision_remark(asked: Job, job: Job, facts: Facts) -> str:
    """Returns what `train.precision: auto` is on the ranks' devices, or `fp16_remark`."""
    if asked.train.precision != "auto":
        return fp16_remark(asked, facts)
    where = "on CPUs" if facts.device == "cpu" else "on these GPUs"
    lacks = "" if facts.device == "cpu" or job.train.precision == "bf16" else ", of which some have no bf16"
    scaled = " with loss scaling" if job.train.dtypes.scales_loss else ""
    return f"train.precision: auto is {job.train.precision}{scaled} {where}{lacks}"


def _smallest_gpu(nodes: Sequence[NodeResources]) -> int:
    return min((node.gpu_bytes for node in nodes if node.gpus and node.gpu_bytes), default=0)


def _places(node: NodeResources, device: str, cpus: float) -> int:
    by_cpu = int((node.free_cpus + 1e-6) // cpus)
    return min(by_cpu, int(node.free_gpus)) if device == "cuda" else by_cpu


def _places_in_words(node: NodeResources, free: int, device: str, cpus: float) -> str:
    there = int(node.gpus) if device == "cuda" else int((node.cpus + 1e-6) // cpus)
    limit = f" with {node.free_cpus:g} CPUs free" if _lacks_cpus(node, free, device) else ""
    return f"{node.ip} has no GPU" if device == "cuda" and not there else f"{node.ip} {free} of {there}{limit}"


def _lacks_cpus(node: NodeResources, free: int, device: str) -> bool:
    return device == "cuda" and free < int(node.free_gpus)


def _way_out(job: Job, free: int, device: str, embedded: bool, free_gpus: int, ended: str) -> str:
    fitting = fitting_mesh(job, free)
    mesh = f"a mesh that fits: {fitting}; or " if fitting else ""
    if device == "cuda" and free_gpus >= job.mesh.world:
        return f"{mesh}lower resources.cpus_per_rank, or start Ray there with a larger --num-cpus"
    if device == "cuda" and not free:
        return f"{ended}add nodes with GPUs (Ray finds them by nvidia-smi), or use resources.device cpu"
    if embedded and device == "cpu":
        return f"{mesh}{ended}`raypp local down` and `raypp local up --cpus {job.mesh.world}`"
    return f"{mesh}{ended}add nodes"


def fitting_mesh(job: Job, free: int) -> str | None:
    """Returns the overrides for the largest mesh of at most `free` ranks; None without one."""
    own = Mesh.of(job.mesh)
    fitting = shapes(free, keep=own.sizes, ep=own.ep, longest=own.sizes)
    best = max(fitting, key=lambda one: (Mesh(one).world, one.pp, one.fsdp), default=None)
    if best is None:
        return None
    changed = {axis: size for axis, size in best.as_dict().items() if size != getattr(own.sizes, axis)}
    return " ".join(f"--set mesh.{axis}={size}" for axis, size in changed.items())


def submit_run(
    job: Job, cluster: Cluster, url: str, *, before: Callable[[], None] = lambda: None, **options: Any
) -> str:
    """Submits a checked job, whose `options` are those of `ray_job`, and returns the Ray job's id.
    Its spec must be in the store, unless `before` writes it, which is called right before the
    submission. Raises UnreachableError: the cluster does not answer, or refuses the job."""
    document = ray_job(job, cluster, url, **options)
    before()
    try:
        return cluster.dashboard.submit_job(document)
    except DashboardError as error:
        raise refused(error) from None


def ray_job(
    job: Job, cluster: Cluster, url: str, *, facts: Facts = ON_CPUS, number: int = 0, user: str = "",
    priority: Priority = "normal",
    files: Mapping[str, bytes] = MappingProxyType({}), rank_function: str | None = None, later: bool = False,
    after: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Returns the Ray job of a run, as `Dashboard.submit_job` takes it; the cluster has its package
    and its keys then. `url`: of the store, in the store's own form. `number`: of its spec; 0: the
    newest. `files`: small ones, by `stored_name`. `rank_function`: for tests, see `RunRequest`.
    `later`: the job may be submitted in days; Ray keeps a package that it was asked about for some
    minutes only. `after`: runs that must have succeeded by then."""
    submission_id = f"raypp-{job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    settings = collect_settings(cluster)
    nodes = cluster.dashboard.nodes()
    request = RunRequest(
        job.name,
        without_secrets(job_document(job)),
        submission_id,
        facts=asdict(facts),
        rank_function=rank_function,
        store=url,
        number=number,
        queued=later,
        user=user,
        priority=priority,
        after=list(after),
    )
    tracking, tracking_secrets = tracker_variables(job, os.environ)
    settings |= tracking
    private = collect_secrets(here=cluster.embedded is not None) | tracking_secrets | secrets_of(job)
    name, content = build_package(
        request, [*own_files(job), *((f"{FOLDER}/{one}", data) for one, data in files.items())]
    )
    environment = {**settings, **deposit(cluster.dashboard, private), "PYTHONUNBUFFERED": "1"}
    if rank_function and os.environ.get("PYTHONPATH"):  # of tests
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    # On a cluster of one node the ranks' server imports torch while driver and controller start.
    beside_server = BESIDE_SERVER if len(nodes) == 1 and forks_workers(request) else ""
    place = cluster.dashboard.put_package if later else cluster.dashboard.upload_package
    return {
        "entrypoint": f"{python_of(cluster)} {beside_server} -m raypp.control.driver",
        "submission_id": submission_id,
        "runtime_env": {"working_dir": place(name, content), "env_vars": environment},
        # job_name: the dashboard's
        "metadata": {"job_name": job.name, "raypp_run": job.name, "raypp_url": url, "raypp_user": user},
    }


def collect_settings(cluster: Cluster) -> dict[str, str]:
    """Returns the submitter's settings without secrets, for the processes of a job. For another
    cluster, including those in files of this machine."""
    if cluster.embedded is not None:
        return collect(SETTINGS + PROFILE, dict(os.environ))
    own: dict[str, str] = {}
    for kind in STORES:
        if kind.own_settings:
            own |= load_object(kind.own_settings)()
    return own | collect(SETTINGS, dict(os.environ))


def collect_secrets(here: bool = False) -> dict[str, str]:
    """Returns the submitter's credentials, including those in files of this machine. `here`: the
    ranks run on this machine and read such files themselves, which renews credentials."""
    credentials = collect(SECRETS, dict(os.environ))
    for kind in STORES:
        if kind.own_secrets and not here:
            credentials |= load_object(kind.own_secrets)()
    return credentials


def command_run(cluster: Cluster, place: RunPlace, method: str, *arguments: object) -> dict[str, Any]:
    """Calls a method of a run's controller; returns the result of `driver.command`. Raises
    UnreachableError: the cluster does not answer, or not in time."""
    words = (place.name, place.url, method, json.dumps(arguments))
    call = Call(f"{method} {place.name}", "raypp.control.driver", words, timeout_s=_COMMAND_PATIENCE_S)
    return ask(cluster, call)


def save_run(cluster: Cluster, place: RunPlace, on_wait: Waiting = lambda: None) -> dict[str, Any]:
    """Requests a checkpoint and waits until it is committed, or can no longer be. `on_wait`: called
    once if that takes longer than a minute. Returns the result of `driver.command`."""
    answer = command_run(cluster, place, "save")
    if answer.get("pending"):
        on_wait()
    while answer.get("pending"):
        answer = command_run(cluster, place, "save", answer["pending"])
    return answer


def stop_run(
    cluster: Cluster, place: RunPlace, store: ObjectStore, *, save: bool, on_wait: Waiting = lambda: None
) -> dict[str, Any]:
    """Stops a run and waits for its end. If its controller has left before it is asked again, the
    end in the store is the answer. `save`: whether a last checkpoint is saved. `on_wait`: called
    once if that takes longer than a minute. Returns the result of `driver.command`."""
    answer = command_run(cluster, place, "stop", save)
    if answer["found"] and answer["state"] is None:
        on_wait()
    while answer["found"] and answer["state"] is None:
        answer = command_run(cluster, place, "stop", save)
    end = None if answer["found"] else read_end(store, place.name)
    return answer if end is None else {"found": True, **asdict(end)}


def no_such_controller(run: str, state: str) -> JobError:
    """Returns the error of a command for a run that has ended. `state`: its state in words."""
    fix = f"`raypp submit JOB --resume --set name={shell_word(run)}` resumes it"
    if state.startswith(RunState.PENDING):
        fix = f"`raypp queue cancel {shell_word(run)}` if it waits; if it was just submitted, try again; else {fix}"
    return JobError(Problem("RUN", f"{run} is {state}; it has no controller now", fix))
