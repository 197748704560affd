"""Snapshots in host memory: ranks are killed by signals, and the run resumes at their step."""

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_run import AttemptReports, Kill, LocalRun, same
from safetensors.torch import load_file
from training import document as small
from training import thinned

from raypp.job.load import parse_job
from raypp.planning.plan import make_plan
from raypp.retry import Backoff
from raypp.state.checkpoint.commit import read_commit
from raypp.state.checkpoint.layout import commit_key
from raypp.state.checkpoint.save import CheckpointSaver
from raypp.state.memory import peer, tier
from raypp.state.memory.files import CONTROL_BYTES, LIMIT_VARIABLE, SlotName, list_slots

STEPS = 8
RUN = "remembers"


def document(**checkpoint: Any) -> dict[str, Any]:
    return small(
        name=RUN, pp=2, microbatches=4, model={"tie_embeddings": True}, pipeline={"lookahead": 0},
        train={"steps": STEPS}, checkpoint={"memory_every_steps": 1, **checkpoint},
    )  # fmt: skip


def assert_ends_as(undisturbed: Any, reports: AttemptReports, run: LocalRun) -> None:
    losses, state = undisturbed
    assert reports.losses == losses and same(run.final_state(), state)


def lose(folder: Path, which: Callable[[SlotName], bool] | None = None) -> None:
    chosen = folder.iterdir() if which is None else (path for name, path in list_slots(folder) if which(name))
    for path in list(chosen):
        path.unlink()


def flip_a_byte(folder: Path, rank: int, step: int) -> None:
    (path,) = (path for name, path in list_slots(folder) if (name.rank, name.step) == (rank, step))
    with path.open("r+b") as file:
        file.seek(CONTROL_BYTES + 1000)
        byte = file.read(1)
        file.seek(CONTROL_BYTES + 1000)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    "stay", thinned([False, True], [True]), ids=["all processes new", "the survivor goes on in its process"]
)
def test_a_run_goes_on_at_the_step_that_a_killed_rank_had_reached(
    stay: bool, tmp_path: Path, shared_memory: Any, undisturbed: Any
) -> None:
    run = LocalRun(document(), tmp_path, [shared_memory()] * 2, [0, 0])
    first = run.attempt_once(Kill((1,), after=4), stay=stay)
    assert list(first.errors) == [0] and first.steps == [1, 2, 3, 4], first
    second = run.attempt_once()
    assert second.restored() == "from memory: step 4 on all 2 ranks; nothing is committed"
    assert [result.step for result in second.results.values()] == [STEPS, STEPS]
    assert second.steps == [1, 2, 3, 4, 5, 6, 7, 8]  # the first four are reported again
    assert not first.left and not second.left
    assert_ends_as(undisturbed, second, run)


def test_a_damaged_snapshot_is_never_used_but_an_older_one_or_the_store(
    tmp_path: Path, shared_memory: Any, undisturbed: Any
) -> None:
    """Three attempts: first a byte of a rank's newest snapshot is wrong, then all are gone."""
    folder = shared_memory()
    run = LocalRun(document(every_steps=3), tmp_path, [folder] * 2, [0, 0])
    run.attempt_once(Kill((0, 1), after=5, commit=3))
    flip_a_byte(folder, 1, 5)
    second = run.attempt_once(Kill((0, 1), after=6, commit=6))
    assert second.restored().startswith(
        "from memory: step 4 on all 2 ranks; newest commit is step 3; "
        "rank 1's snapshot of step 5 is corrupt between bytes "
    )
    lose(folder, lambda name: name.rank == 0)
    third = run.attempt_once()
    assert third.restored() == "from the store: step 6; no snapshot in memory is newer"
    assert_ends_as(undisturbed, third, run)


def test_a_node_that_loses_its_memory_gets_its_snapshot_back_from_its_partner(
    tmp_path: Path, shared_memory: Any, undisturbed: Any
) -> None:
    here, there = shared_memory(), shared_memory()
    run = LocalRun(document(), tmp_path, [here, there], [0, 1])
    run.attempt_once(Kill((0, 1), after=5, copies=2))
    lose(there)
    left = {(name.rank, name.step) for name, _ in list_slots(here)}
    common = max(step for rank, step in left if rank == 0 and step is not None and (1, step) in left)
    second = run.attempt_once()
    assert second.restored() == (
        f"from memory: step {common} on all 2 ranks (rank 1 from the copy on another node); nothing is committed"
    )
    assert_ends_as(undisturbed, second, run)


@pytest.mark.gate
def test_a_run_does_without_when_memory_is_short_and_says_so(
    tmp_path: Path, shared_memory: Any, undisturbed: Any
) -> None:
    folder = shared_memory()
    run = LocalRun(document(), tmp_path, [folder] * 2, [0, 0], {LIMIT_VARIABLE: "0.5"})
    attempt = run.attempt_once()
    why = {event.message.split(",")[0] for event in attempt.of_kind("memory_tier_off")}
    assert why and all(one.startswith("2 ranks of this node need 3 × ") for one in why), attempt.events
    assert attempt.losses == undisturbed[0] and not list(folder.iterdir())


def memory_for_five() -> dict[str, str]:
    """Returns a limit with which five files per rank fit on each node, six do not."""
    state = make_plan(parse_job({**document(), "checkpoint": {"url": "/nowhere"}})).host.state
    return {LIMIT_VARIABLE: str(7 * state / 1e6)}  # 80 % of it are for snapshots


@pytest.mark.slow
def test_with_memory_for_five_snapshots_copies_survive_a_node_as_well(
    tmp_path: Path, shared_memory: Any, undisturbed: Any
) -> None:
    here, there = shared_memory(), shared_memory()
    run = LocalRun(document(), tmp_path, [here, there], [0, 1], memory_for_five())
    first = run.attempt_once(Kill((0, 1), after=5, copies=2))
    why = {event.message for event in first.of_kind("memory_tier_reduced")}
    assert why and all(one.endswith("with 5, snapshots wait for their copies") for one in why), first.events
    assert [sum(name.kind == kind for name, _ in list_slots(here)) for kind in ("own", "copy")] == [3, 2]
    lose(there)
    second = run.attempt_once()
    assert second.restored().startswith("from memory: step ") and "rank 1 from the copy" in second.restored()
    assert_ends_as(undisturbed, second, run)


def deaf_node(rank: int, world: int, port: int) -> None:
    """Rank 1's node takes no copies, as behind a firewall. Rank 0 trains on when it knows it."""
    peer._RETRIES = Backoff(60, 0.01, 0.01)
    start, signals = tier.MemoryTier.start, tier.MemoryTier.signals

    def started(self: Any, *arguments: Any) -> None:
        start(self, *arguments)
        if rank == 1:
            self._receiver.close()

    def signalled(self: Any) -> Any:
        end = time.monotonic() + 60
        while (sender := self._sender) is not None and sender._slot is not None and sender.failures < 9:
            assert rank == 1 or time.monotonic() < end, "copies arrive"
            if rank == 1:
                break
            time.sleep(0.002)
        return signals(self)

    tier.MemoryTier.start, tier.MemoryTier.signals = started, signalled  # type: ignore[method-assign]


@pytest.mark.gate
def test_with_memory_for_five_snapshots_a_deaf_partner_does_not_stop_them(
    tmp_path: Path, shared_memory: Any, undisturbed: Any
) -> None:
    """With few files a snapshot waits for the copy of the one before, but not for ever."""
    folders = [shared_memory(), shared_memory()]
    run = LocalRun(document(), tmp_path, folders, [0, 1], memory_for_five(), prepare=deaf_node)
    first = run.attempt_once(Kill((0, 1), after=6))
    why = [event.message for event in first.of_kind("memory_tier_reduced") if "do not arrive" in event.message]
    assert why == ["the copies of rank 0 do not arrive ([Errno 111] Connection refused): no copies on another node"]
    second = run.attempt_once()
    assert second.restored() == "from memory: step 6 on all 2 ranks; nothing is committed"
    assert_ends_as(undisturbed, second, run)


FSDP = {"mesh": {"pp": 2, "fsdp": 2}, "microbatches": 4}
REPLICAS = {"mesh": {"pp": 2, "dp_replicate": 2}, "microbatches": 4}
TWO, STAGES = {"mesh": {"pp": 2}, "microbatches": 8}, {"mesh": {"pp": 4}, "microbatches": 8}
RESHAPED = {
    "fsdp 4 to 2": (FSDP, TWO),
    "2 to fsdp 4": (TWO, FSDP),
    "replicas 4 to 2": (REPLICAS, TWO),
    "stages 4 to 2": (STAGES, TWO),
}


def on_mesh(run: LocalRun, shape: dict[str, Any], folders: list[Path]) -> None:
    """Puts the run on another mesh, whose ranks are spread over the nodes with these folders."""
    ranks = math.prod(shape["mesh"].values())
    run.document |= {
        "mesh": shape["mesh"],
        "pipeline": {**run.document["pipeline"], "microbatches": shape["microbatches"]},
    }
    run.nodes = [rank * len(folders) // ranks for rank in range(ranks)]
    run.directories = [str(folders[node]) for node in run.nodes]


def same_end(ours: LocalRun, theirs: LocalRun) -> bool:
    name = ours.document["name"]
    commits = [read_commit(run.store, name, STEPS) for run in (ours, theirs)]
    pairs = zip(*(commit.objects for commit in commits), strict=True)
    roots = [Path(run.document["checkpoint"]["url"]) for run in (ours, theirs)]
    return all(same(*(load_file(root / one.key) for root, one in zip(roots, pair, strict=True))) for pair in pairs)


def knows_no_commit(rank: int, world: int, port: int) -> None:
    """A snapshot would else not be used when the commit that it knows is gone."""
    CheckpointSaver.committed = property(lambda self: None)  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("name", thinned(RESHAPED, ["fsdp 4 to 2", "2 to fsdp 4"]))
def test_another_mesh_resumes_from_memory_as_from_a_commit_of_that_step(
    name: str, tmp_path: Path, shared_memory: Any
) -> None:
    before, after = RESHAPED[name]
    folder = shared_memory()
    memory = LocalRun(document(every_steps=4), tmp_path / "memory", [folder] * 4, [0] * 4, prepare=knows_no_commit)
    on_mesh(memory, before, [folder])
    ranks = range(len(memory.nodes))
    memory.attempt_once(Kill(tuple(ranks), after=4, commit=4))
    shutil.copytree(tmp_path / "memory", tmp_path / "store")
    store = LocalRun(document(every_steps=4, memory_tier=False), tmp_path / "store", [folder] * 4, [0] * 4)
    store.attempt = 1
    memory.store.delete([commit_key(RUN, 4)])
    for run in (memory, store):
        on_mesh(run, after, [folder])
    ours, theirs = memory.attempt_once(), store.attempt_once()
    others = len(ranks) != len(memory.nodes)
    assert ours.restored() == (
        f"from memory: step 4 on all {len(memory.nodes)} ranks"
        + f", of {len(ranks)} ranks' snapshots" * others
        + "; nothing is committed"
    )
    assert theirs.of_kind("resumed")[0].step == 4 and theirs.losses == ours.losses and not ours.left
    assert same_end(memory, store)


@pytest.mark.parametrize("shape", thinned(["copies", "replicas"], [], ["copies"]))
def test_half_of_the_nodes_is_lost_and_the_other_half_resumes_from_memory(
    shape: str, tmp_path: Path, shared_memory: Any
) -> None:
    """From copies; or, with copies gone, from the replica that the other node holds."""
    before = FSDP if shape == "copies" else {"mesh": {"dp_replicate": 2, "pp": 1, "fsdp": 2}, "microbatches": 4}
    run = LocalRun(document(), tmp_path, [tmp_path] * 4, [0] * 4)
    here, there = shared_memory(), shared_memory()
    on_mesh(run, before, [here, there])
    run.attempt_once(Kill(tuple(range(4)), after=5, copies=4))
    lose(there)
    if shape == "replicas":
        lose(here, lambda name: name.kind == "copy")
    on_mesh(run, TWO if shape == "copies" else {"mesh": {"pp": 1, "fsdp": 2}, "microbatches": 8}, [here])
    second = run.attempt_once()
    assert second.restored().startswith("from memory: step "), second.restored()
    assert ", of 4 ranks' snapshots; nothing is committed" in second.restored()
    assert sorted(second.losses)[-1] == STEPS, second
