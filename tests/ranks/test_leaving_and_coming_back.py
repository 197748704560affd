"""One process serves several attempts: a real rank leaves an attempt midway and starts again."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from collecting_reporter import CollectingReporter
from harness import run_ranks
from safetensors.numpy import load
from training import document

from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.ports import free_port, free_ports
from raypp.rank.joining.abort import cut_connections
from raypp.rank.joining.lost_peer import LostPeerError
from raypp.rank.own_seat import local_seat
from raypp.rank.rank import run_rank
from raypp.records import Requests
from raypp.state.checkpoint.commit import list_checkpoints
from raypp.storage import open_store

STEPS, EVERY = 12, 2


def _document(root: Path) -> dict[str, Any]:
    checkpoint = {"url": str(root), "every_steps": EVERY, "keep": 20}
    return document(name="back", pp=2, microbatches=2, train={"steps": STEPS}, checkpoint=checkpoint)


class Standing(CollectingReporter):
    """Stalls before a step of an attempt, like a frozen rank, until it is released."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at, self.go = at, threading.Event()

    def requests(self) -> Requests:
        requests = super().requests()
        if self.asked == self.at:
            self.go.wait()
        return requests


def _lives(rank: int, world: int, _port: int, root: str, ports: list[int], halts: list[int | None]) -> dict[str, Any]:
    """Runs a life per port. Rank 1 stalls before a step until rank 0 has left, and must leave."""
    job = parse_job(_document(Path(root)))
    left_over = []
    for attempt, (port, halt) in enumerate(zip(ports, halts, strict=True), start=1):
        reporter = Standing(halt if rank else None)
        rank_0_left = Path(f"{root}-left-{attempt}")
        outcome: list[Any] = []
        seat = local_seat(rank, world, port, job, attempt=attempt)
        thread = threading.Thread(target=_live, args=(job, seat, reporter, outcome))
        thread.start()
        if halt is not None:
            while reporter.asked < halt:  # rank 0 then waits for the stalled rank 1
                time.sleep(0.01)
            time.sleep(0.3)
            while thread.is_alive():
                cut_connections(port)
                if rank_0_left.exists():
                    reporter.go.set()
                thread.join(0.05)
            if rank == 0:
                rank_0_left.touch()
        thread.join()
        gc.collect()
        own = psutil.Process()
        left_over.append((own.num_fds(), own.num_threads(), own.memory_info().rss))
        if halt is not None:
            assert isinstance(outcome[0], LostPeerError), outcome[0]
        else:
            assert outcome[0].step == STEPS, outcome[0]
    return {"left_over": left_over, "threads": [t.name for t in threading.enumerate()]}


def _live(job: Any, seat: Any, reporter: CollectingReporter, outcome: list[Any]) -> None:
    try:
        outcome.append(run_rank(decide(job), seat, reporter))
    except BaseException as error:  # noqa: BLE001
        outcome.append(error)


def _last(root: Path) -> dict[str, bytes]:
    store = open_store(str(root))
    newest = list_checkpoints(store, "back")[-1]
    assert newest.step == STEPS
    folder = newest.key.rpartition("/")[0]
    tensors: dict[str, bytes] = {}
    for info in store.list(f"{folder}/"):
        if not info.key.endswith("COMMIT"):
            tensors |= {name: tensor.tobytes() for name, tensor in load(store.get(info.key)).items()}
    return tensors


def test_a_process_that_leaves_a_hung_attempt_trains_on_in_the_next_and_gets_the_same_bits(tmp_path: Path) -> None:
    halts: list[int | None] = [2, 3, 2, None]
    ports = free_ports(len(halts))
    results = run_ranks(2, _lives, str(tmp_path / "again"), ports, halts)
    for result in results:
        assert not [name for name in result["threads"] if name.startswith("raypp-")]
        descriptors, threads, memory = zip(*result["left_over"], strict=True)
        assert max(descriptors[1:]) <= descriptors[0] + 2, f"descriptors are kept: {descriptors}"
        assert max(threads[1:]) <= threads[0] + 1, f"threads are kept: {threads}"
        assert memory[-2] < memory[0] + 24e6, f"memory is kept: {memory}"
    run_ranks(2, _lives, str(tmp_path / "once"), [free_port()], [None])
    once, again = _last(tmp_path / "once"), _last(tmp_path / "again")
    assert once.keys() == again.keys()
    assert [name for name in once if once[name] != again[name]] == []
