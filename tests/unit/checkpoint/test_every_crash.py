"""Either of two ranks dies at any operation of the real saver: store, piece, announcement."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from collecting_reporter import CollectingReporter
from in_one_process import InOneProcess
from newest_usable import newest_usable
from test_commit_protocol import Died
from test_save_and_load import RUN, adamw
from torch import nn

from raypp.records import Coordinates, Seat
from raypp.state.checkpoint.commit import claim_attempt, list_checkpoints
from raypp.state.checkpoint.layout import commit_key, rank_key
from raypp.state.checkpoint.save import CheckpointSaver
from raypp.storage.directory import DirectoryStore

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")]


class Life:
    """Counts a process's operations; it dies at the n-th, before or after its effect, for good."""

    def __init__(self, ends_at: int, after: bool) -> None:
        self.ends_at, self.after, self.done, self.lock = ends_at, after, 0, threading.RLock()

    @property
    def over(self) -> bool:
        return 0 < self.ends_at < self.done

    def act(self, deed: Callable[[], Any]) -> Any:
        with self.lock:
            self.done += 1
            here = self.done == self.ends_at
            if self.over or (here and not self.after):
                self.done += 1
                raise Died
        result = deed()
        if here:
            self.done += 1
            raise Died
        return result


class MortalStore:
    """A directory used by one process; the pieces of a stream count as operations."""

    def __init__(self, store: DirectoryStore, life: Life) -> None:
        self._store, self._life, self.url = store, life, store.url

    def put_stream(self, key: str, chunks: Any, size: int) -> None:
        piece = -(-size // 3)

        def pieces() -> Any:
            for start in range(0, size, piece):
                views = self._life.act(lambda start=start: chunks.views(start, min(start + piece, size)))
                yield b"".join(views)

        self._life.act(lambda: self._store.put_stream(key, pieces(), size))

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        def act(*arguments: Any, **options: Any) -> Any:
            result = self._life.act(lambda: real(*arguments, **options))
            return list(result) if name in ("list", "unfinished") else result

        return act


class Talk:
    """What the ranks of one attempt have announced, and the threads that may still do so."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int], dict[str, Any]] = {}
        self.news = threading.Condition()
        self.threads: dict[int, threading.Thread] = {}


class Shared(InOneProcess):
    """Announcements of one attempt, seen by one process."""

    def __init__(self, talk: Talk, life: Life) -> None:
        self._talk, self._life = talk, life

    def announce(self, step: int, rank: int, message: dict[str, Any]) -> None:
        with self._talk.news:
            self._life.act(lambda: self._talk.messages.update({(step, rank): message}))
            self._talk.news.notify_all()

    def wait_all(self, step: int, ranks: Sequence[int], *_: Any) -> dict[int, dict[str, Any]]:
        """Returns what all have said; raises TimeoutError once a rank can no longer say it."""
        talk = self._talk
        with talk.news:
            while True:
                ended = {rank for rank, thread in list(talk.threads.items()) if not thread.is_alive()}
                missing = [rank for rank in ranks if (step, rank) not in talk.messages]
                if not missing:
                    return {rank: talk.messages[step, rank] for rank in ranks}
                if ended.intersection(missing):
                    raise TimeoutError(f"ranks {missing} said nothing")
                talk.news.wait(0.01)  # a thread that dies tells nobody


def attempt(store: DirectoryStore, number: int, step: int, lives: Sequence[Life]) -> None:
    """Saves one step on two ranks; returns when both have ended or died."""
    talk = Talk()
    for rank, life in enumerate(lives):
        torch.manual_seed(rank)
        stage = nn.ModuleDict({f"layer{rank}": nn.Linear(8, 8)})
        seat = Seat(RUN, number, rank, 2, Coordinates(pp=rank), Coordinates(2, 1, 1, 1, 1))
        there: Any = MortalStore(store, life)
        saver = CheckpointSaver(there, RUN, {}, seat, Shared(talk, life), CollectingReporter(), keep=1)
        saver.save(step, [stage], adamw(stage), {})
        assert saver._thread is not None
        talk.threads[rank] = saver._thread
    for thread in talk.threads.values():
        thread.join()


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_anywhere_leaves_the_old_or_the_new_state_whole(tmp_path: Path, dies: int, after: bool) -> None:
    seen, place = set(), 0
    while True:
        place += 1
        store = DirectoryStore(tmp_path / f"{place}")
        claim_attempt(store, RUN, 1)
        attempt(store, 1, 10, [Life(0, False), Life(0, False)])
        lives = [Life(place if rank == dies else 0, after) for rank in (0, 1)]
        attempt(store, 1, 20, lives)
        newest, problems = newest_usable(store, RUN)
        assert newest is not None and problems == []
        assert newest.step in (10, 20)
        seen.add(newest.step)
        claim_attempt(store, RUN, 2)
        attempt(store, 2, 30, [Life(0, False), Life(0, False)])
        assert [checkpoint.step for checkpoint in list_checkpoints(store, RUN)] == [30]
        left = {info.key for info in store.list(f"{RUN}/step-")}
        assert left == {commit_key(RUN, 30), rank_key(RUN, 30, 2, 0), rank_key(RUN, 30, 2, 1)}
        if not lives[dies].over:
            break
    assert place > (10 if dies == 0 else 5)
    assert seen == {10, 20}
