import gc
import json
import threading
import time
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_jobs import as_lists, corpus_of, data_identity, job, loading, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.api.checked_job import _remarks
from raypp.errors import DataError, JobError
from raypp.job.checks import check_spec
from raypp.job.job import Job
from raypp.job.load import job_document, parse_job
from raypp.rank.data.loader import Loader, Prefetch, Share, open_loader, order_of, passes_in_words, with_steps
from raypp.rank.data.packing import NO_LABEL, Cursor, RowOrder, RowPlan, make_row, rows_from
from raypp.rank.data.sources import Documents, open_documents
from raypp.rank.data.tokenizer import ByteTokenizer

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=50)


def made(lengths: list[int], share: Share, *, packing: bool = True, shuffle: bool = True, block: int = 11) -> Loader:
    corpus = corpus_of(lengths)
    plan = RowPlan(corpus, 16, packing, shuffle, 1, block=block)
    return Loader(Documents(corpus, None, ByteTokenizer(), "id"), RowOrder(plan), share)


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, packing=st.booleans(), shuffle=st.booleans(), steps=st.integers(1, 8))
def test_the_replicas_together_read_what_one_process_reads(
    lengths: list[int], packing: bool, shuffle: bool, steps: int
) -> None:
    def read(share: Share) -> list[list[object]]:
        loader = made(lengths, share, packing=packing, shuffle=shuffle)
        read = [as_lists(rows_of([loader.next_step()])) for _ in range(steps)]
        loader.close()
        return [*read, loader.position()]  # type: ignore[list-item]

    alone = read(Share(0, 1, 4, 2))
    for replicas in (2, 4):
        shares = [read(Share(r, replicas, 4 // replicas, 2)) for r in range(replicas)]
        for step in range(steps):
            assert [row for share in shares for row in share[step]] == alone[step]
        assert all(share[-1] == alone[-1] for share in shares)


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, packing=st.booleans(), before=st.integers(0, 12), rows=st.integers(1, 7))
def test_a_sought_loader_goes_on_as_if_nothing_had_been(
    lengths: list[int], packing: bool, before: int, rows: int
) -> None:
    share = Share(0, 1, rows, 1)
    first, second = made(lengths, share, packing=packing), made(lengths, share, packing=packing)
    for _ in range(before):
        first.next_step()
    second.seek(json.loads(json.dumps(first.position())))
    assert second.position() == first.position()
    for _ in range(6):
        assert as_lists(rows_of([first.next_step()])) == as_lists(rows_of([second.next_step()]))
        assert first.position() == second.position()
    first.close()
    second.close()


@given(lengths=LENGTHS)
@settings(max_examples=25, deadline=None)
def test_no_row_is_dropped_at_the_end_of_an_epoch(lengths: list[int]) -> None:
    corpus = corpus_of(lengths)
    plan = RowPlan(corpus, 16, True, True, 1, block=11)
    first, second = (sum(len(plan.block(epoch, i)) for i in range(plan.blocks)) for epoch in (0, 1))
    taken = list(islice(rows_from(plan, Cursor()), first + second))
    assert taken[first - 1][1] == Cursor(1, 0, 0)
    for part in (taken[:first], taken[first:]):
        ids = np.concatenate([make_row(corpus, pieces).tokens for pieces, _ in part])
        assert sorted(ids.tolist()) == list(range(sum(lengths)))


def test_a_position_is_that_of_the_steps_handed_out_however_far_the_thread_is() -> None:
    loader = made([5] * 100, Share(0, 1, 2, 1))
    assert loader.position() == {"epoch": 0, "block": 0, "row": 0, "data": "id"}
    loader.next_step()
    position = loader.position()
    time.sleep(0.05)
    assert loader.position() == position == {"epoch": 0, "block": 0, "row": 2, "data": "id"}
    loader.close()


def test_a_closed_loader_goes_on_where_it_was() -> None:
    loader, other = made([5] * 100, Share(0, 1, 2, 1)), made([5] * 100, Share(0, 1, 2, 1))
    for _ in range(5):
        assert as_lists(rows_of([loader.next_step()])) == as_lists(rows_of([other.next_step()]))
        loader.close()
    other.close()


def test_what_a_loader_has_prepared_is_dropped_when_it_is_sent_elsewhere() -> None:
    share = Share(0, 1, 2, 1)
    with closing(made([9] * 40, share)) as loader, closing(made([9] * 40, share)) as other:
        start = loader.position()
        first = as_lists(rows_of([loader.next_step()]))
        loader.next_step()
        loader.seek(start)
        assert as_lists(rows_of([loader.next_step()])) == first == as_lists(rows_of([other.next_step()]))
        assert loader.position() == other.position()


def test_a_position_of_other_data_is_refused() -> None:
    loader = made([5] * 10, Share(0, 1, 2, 1))
    with pytest.raises(JobError, match="other data") as caught:
        loader.seek({**loader.position(), "data": "else"})
    assert caught.value.problems[0].key == "data.path"
    with pytest.raises(JobError, match="data position"):
        loader.seek({"epoch": 0})


def test_the_thread_ends_with_the_loader() -> None:
    def threads() -> int:
        return sum(thread.name.startswith("raypp-data") for thread in threading.enumerate())

    before = threads()
    closed, forgotten = made([5] * 10, Share(0, 1, 2, 1)), made([5] * 10, Share(0, 1, 2, 1))
    closed.next_step()
    forgotten.next_step()
    assert threads() == before + 2
    closed.close()
    del forgotten
    gc.collect()
    deadline = time.monotonic() + 60
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == before


def test_an_error_of_the_thread_is_raised_when_it_is_its_turn_and_ever_after() -> None:
    def items() -> object:
        yield 1
        raise DataError("gone")

    prefetch = Prefetch(items(), 2)  # type: ignore[arg-type, var-annotated]
    assert prefetch.take() == 1
    for _ in range(2):
        with pytest.raises(DataError, match="gone"):
            prefetch.take()
    prefetch.close()


def test_the_thread_is_never_more_than_two_steps_ahead() -> None:
    made_items: list[int] = []

    def items() -> object:
        for number in range(100):
            made_items.append(number)
            yield number

    prefetch = Prefetch(items(), 2)  # type: ignore[arg-type, var-annotated]

    def ahead(count: int) -> None:
        end = time.monotonic() + 60
        while len(made_items) < count and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(made_items) == count

    ahead(2)
    assert prefetch.take() == 0
    ahead(3)
    prefetch.close()


def test_held_out_documents_are_never_trained_on_and_come_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph {i}" for i in range(50)))
    request = job(kind="text", path=str(tmp_path), eval={"fraction": 0.2}, seq_len=64)
    with loading(request) as loader:
        held_out = b"".join(bytes(t for t in row.tokens if t < 256) for row in rows_of(loader.held_out()))
        steps = [loader.next_step() for _ in range(20)]
        trained = b"".join(bytes(t for t in row.tokens if t < 256) for row in rows_of(steps))
    ids_held = {int(part) for part in held_out.split(b"paragraph ")[1:]}
    ids_trained = {int(part) for part in trained.split(b"paragraph ")[1:]}
    assert len(ids_held) == 10 and held_out.count(b"paragraph") == 10
    assert ids_trained == set(range(50)) - ids_held


def test_every_replica_evaluates_equally_many_full_steps(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("\n\n".join("x" * n for n in range(1, 12)))
    (tmp_path / "train.txt").write_text("some text")
    request = job(
        kind="text", path=str(tmp_path / "train.txt"), eval={"path": str(tmp_path / "held.txt")}, packing=False
    )
    shares = []
    for replica in range(2):
        with loading(request, replica, 2) as loader:
            shares.append(list(loader.held_out()))
    assert [len(steps) for steps in shares] == [2, 2]
    rows = rows_of(shares[0]) + rows_of(shares[1])
    assert len(rows) == 2 * 2 * 2 * 2
    assert sum(int((row.labels != NO_LABEL).sum()) for row in rows) == sum(range(1, 12))


def test_steps_beyond_one_pass_over_the_data_and_a_warm_up_beyond_the_run_are_said(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("x" * 159)
    data = {"kind": "text", "path": str(tmp_path / "words.txt"), "seq_len": 32}

    def of_steps(steps: int, warmup: int) -> Job:
        train = {"steps": steps, "micro_batch_size": 1, "lr_schedule": {"warmup_steps": warmup}}
        return parse_job({"name": "a", "data": data, "train": train, "pipeline": {"microbatches": 1}})

    warm_up, passes = _remarks(of_steps(40, 60))
    assert warm_up.endswith("60 is longer than the run of 40 steps: the learning rate reaches 0.0002 of 0.0003")
    assert passes == "40 steps are 8 epochs of 5 rows"
    assert passes_in_words(open_documents(of_steps(40, 60)), of_steps(40, 60)) == passes
    assert not list(_remarks(of_steps(5, 5)))


@pytest.mark.parametrize(("packing", "epochs"), [(True, 3), (False, 3), (True, 1.5)])
def test_epochs_are_the_steps_that_take_their_rows_as_packed(tmp_path: Path, packing: bool, epochs: float) -> None:
    (tmp_path / "words.txt").write_text("\n\n".join("x" * (1 + 7 * i % 30) for i in range(97)))
    data = {"kind": "text", "path": str(tmp_path / "words.txt"), "seq_len": 32, "packing": packing}
    asked = parse_job({"name": "a", "data": data, "train": {"epochs": epochs}, "pipeline": {"microbatches": 2}})
    counted, words = with_steps(asked)
    assert words == f"train.epochs: {epochs:g} are {counted.train.steps} steps: {words.split()[5]} rows, 4 in a step"
    assert counted.train.epochs is None and parse_job(job_document(counted)) == counted
    rows = int(words.split()[5])
    order = order_of(open_documents(counted), counted)
    taken = [pieces for pieces, _ in islice(order.rows(order.start), rows)]
    seen = Counter(piece for pieces in taken for piece in pieces)
    assert set(seen.values()) == ({3} if epochs == 3 else {1, 2}) and len(seen) == order.once().pieces
    assert counted.train.steps == -(-rows // 4)
    (problem,) = check_spec(parse_job({"name": "a", "data": data, "train": {"epochs": 2, "steps": 5}}))
    assert problem.key == "train.epochs" and "steps: 5 is given, too" in problem.fault


@pytest.mark.parametrize(
    ("settings", "longest", "tokens"),
    [({"max_document": 8}, 8, 97), ({"max_document": 40, "too_long": "drop"}, 32, 46), ({"too_long": "drop"}, 6, 6)],
)
def test_the_longest_document_is_apart_from_the_row(
    tmp_path: Path, settings: dict[str, Any], longest: int, tokens: int
) -> None:
    (tmp_path / "words.txt").write_text("\n\n".join("x" * count for count in (5, 39, 50)))
    asked = job(kind="text", path=str(tmp_path / "words.txt"), seq_len=32, **settings)
    order = order_of(open_documents(asked), asked)
    pieces = [piece for rows in order.once().block(0, 0) for piece in rows]
    assert (max(piece.length for piece in pieces), sum(piece.length for piece in pieces)) == (longest, tokens)
    useless = job(kind="text", path=str(tmp_path / "words.txt"), seq_len=32, max_document=32)
    assert [one.key for one in check_spec(useless)] == ["data.max_document"]


def test_asking_for_held_out_rows_that_there_are_not_is_an_error() -> None:
    with loading(job(kind="synthetic")) as loader, pytest.raises(DataError, match="is not set"):
        loader.held_out()


def test_the_identity_follows_what_decides_the_rows_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "same.txt").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_text("one\n\ntwa")
    base = {"kind": "text", "path": str(tmp_path / "a.txt")}
    identity = data_identity(job(**base))
    assert identity == data_identity(job(**{**base, "path": str(tmp_path / "same.txt")}))
    assert identity == data_identity(job(**base, microbatches=8, micro_batch_size=1))
    assert identity == open_loader(job(**base), 1, 2).identity
    other = {"path": str(tmp_path / "b.txt")}
    for change in (other, {"seq_len": 128}, {"packing": False}, {"seed": 1}, {"shuffle": False}):
        assert identity != data_identity(job(**{**base, **change}))
