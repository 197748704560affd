"""Damaged documents of a run are named by their place, or an older checkpoint is used."""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypp.cli.main import run
from raypp.errors import CheckpointError
from raypp.job.load import parse_job
from raypp.state.checkpoint.announce import read_announcement
from raypp.state.checkpoint.commit import FORMAT, Commit
from raypp.state.checkpoint.compatibility import check_resume
from raypp.state.checkpoint.run_spec import read_spec
from raypp.state.checkpoint.tensor_file import TensorEntry, cover_once, decode_header, encode_header
from raypp.state.memory.files import decode_control
from raypp.state.memory.slot import StoredSlot
from raypp.state.run_records.append_log import LONGEST_LINE
from raypp.state.run_records.reader import RunReader
from raypp.storage.directory import DirectoryStore
from tests.fuzz.stored_run import (
    COMMIT,
    EVENTS,
    HISTORY,
    LOGS,
    NAME,
    OBJECT,
    SPEC,
    STATUS,
    commit_with,
    documents,
    record_of,
    replaced,
)

Change = Callable[[dict[str, Any]], object]
DEEP = b"[" * 100_000 + b"]" * 100_000


def changed(key: str, change: Change) -> bytes:
    document = json.loads(documents()[key])
    change(document)
    return json.dumps(document).encode()


COMMITS: list[tuple[str, Change | bytes]] = [
    ("objects[1].size is -1: should be greater", lambda d: d["objects"][1].update(size=-1)),
    ("objects[0].size is 1.5", lambda d: d["objects"][0].update(size=1.5)),
    ("objects[0].size is 1000000000000000000000", lambda d: d["objects"][0].update(size=10**21)),
    ("objects[0].key is 7", lambda d: d["objects"][0].update(key=7)),
    ('objects[0].key is "../../etc/passwd"', lambda d: d["objects"][0].update(key="../../etc/passwd")),
    (
        "objects[1].rank is 0, which has another object",
        lambda d: d["objects"].append(d["objects"][0]) or d["objects"].pop(1),
    ),
    ("objects[0].rank is -1", lambda d: d["objects"][0].update(rank=-1)),
    ("objects[0].header_size is 99999, but", lambda d: d["objects"][0].update(header_size=99999)),
    ("objects[0].colour is not a known key", lambda d: d["objects"][0].update(colour=1)),
    ("objects[0].sha256 is", lambda d: d["objects"][0].update(sha256="0" * 65)),
    ("objects is an object", lambda d: d.update(objects={})),
    ("mesh.pp is -1", lambda d: d["mesh"].update(pp=-1)),
    ("mesh is 3", lambda d: d.update(mesh=3)),
    ("job is a list", lambda d: d.update(job=[])),
    ("extra is null", lambda d: d.update(extra=None)),
    ("created is NaN", lambda d: d.update(created=float("nan"))),
    ("created is 1e+300", lambda d: d.update(created=1e300)),
    ("step is true", lambda d: d.update(step=True)),
    ("step is missing", lambda d: d.pop("step")),
    ("format is missing", lambda d: d.pop("format")),
    ("format -1, but this raypp reads 1", lambda d: d.update(format=-1)),
    ("is the commit of step 1 of", lambda d: d.update(step=1, objects=[])),
    ('is the commit of step 2 of "other"', lambda d: d.update(run="other", objects=[])),
    ("is not JSON", b"{"),
    ("is not JSON", b"\xff\xfe"),
    ("is not JSON", DEEP),
    ("is a list", b"[]"),
    ("bytes; at most", b" " * (17 << 20)),
    ("values; at most", b"[" + b"0," * 400_000 + b"0]"),
]


@pytest.mark.parametrize(("said", "change"), COMMITS)
def test_a_damaged_commit_is_reported_and_the_older_checkpoint_is_used(
    said: str, change: Change | bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    if isinstance(said, str) and said.startswith("objects[1].rank"):
        place = "attempt-1/rank-00000"
        change = changed(
            COMMIT, lambda d: d["objects"][1].update(rank=0, key=f"{NAME}/step-00000002/{place}.safetensors")
        )
    data = change if isinstance(change, bytes) else changed(COMMIT, change)
    with replaced(**{COMMIT: data}) as store:
        assert run(["checkpoints", "show", f"{store}/{NAME}", "--json"]) == 0
        reported = capsys.readouterr()
        assert json.loads(reported.out)["step"] == 1
        assert "step 1 is used, because newer checkpoints cannot be read" in reported.err
        assert said in reported.err and COMMIT in reported.err
        assert run(["checkpoints", "show", f"{store}/{NAME}/step-2"]) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_a_commit_of_another_format_is_refused_by_name_whatever_else_it_has(other: int) -> None:
    for change in (lambda d: d, lambda d: d.update(objects="elsewhere", more={})):
        data = changed(COMMIT, lambda d, change=change: (d.update(format=other), change(d)))
        with pytest.raises(CheckpointError, match=f"{COMMIT}: has format {other}, but this raypp reads {FORMAT}"):
            Commit.from_bytes(data, COMMIT)


def header(change: Change) -> bytes:
    """Returns the newest object of rank 1 with a changed header; raypp's own part is decoded."""
    whole = documents()[OBJECT]
    length = int.from_bytes(whole[:8], "little")
    document = json.loads(whole[8 : 8 + length])
    about = json.loads(document["__metadata__"]["raypp"])
    document["about"] = about
    change(document)
    if "about" in document:
        document["__metadata__"]["raypp"] = json.dumps(document.pop("about"))
    text = json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text + whole[8 + length :]


NORM = "model.norm.weight"
HEADERS: list[tuple[str, Change | bytes]] = [
    ("it says that it has 1000000000000000000 bytes", (10**18).to_bytes(8, "little") + documents()[OBJECT][8:]),
    ("it says that it has 0 bytes", b"\x00\x00"),
    ("is not JSON", (3).to_bytes(8, "little") + b"{{{"),
    ("__metadata__.raypp is missing", lambda d: (d.pop("about"), d.pop("__metadata__"))),
    ("shape is not a list of at most 64 whole numbers", lambda d: d[NORM].update(shape=[-4])),
    ("data_offsets is not two whole numbers", lambda d: d[NORM].update(data_offsets=[0])),
    ("data_offsets is not two whole numbers", lambda d: d[NORM].update(data_offsets=[1e308, 2])),
    ("is not described by data_offsets, dtype, shape", lambda d: d[NORM].pop("dtype")),
    ('dtype "F9"', lambda d: d[NORM].update(dtype="F9")),
    ("does not match its shape (F32, 4000000000000000000 bytes)", lambda d: (
        d[NORM].update(shape=[10**18]), d["about"]["tensors"][NORM].update(shape=[10**18 + 4], offset=[0]))),
    ("is not within [4]", lambda d: d["about"]["tensors"][NORM].update(shape=[4])),
    ("have 1, 2 and 1 dimensions", lambda d: d["about"]["tensors"][NORM].update(offset=[0, 0])),
    ("has no place", lambda d: d["about"]["tensors"].pop(NORM)),
    ("overlap", lambda d: d[NORM].update(data_offsets=[at + 4 for at in d[NORM]["data_offsets"]])),
    ("begins at byte", lambda d: d.pop(NORM)),
    ("the tensors end at byte", lambda d: d.pop("optim/model.norm.weight/step")),
    ("checksums of blocks", lambda d: d["about"].update(blocks="")),
    ("block_bytes is 0", lambda d: d["about"].update(block_bytes=0)),
    ("blocks is 3", lambda d: d["about"].update(blocks=3)),
    ("tensors is a list", lambda d: d["about"].update(tensors=[])),
]  # fmt: skip


@pytest.mark.parametrize(("said", "change"), HEADERS)
def test_a_header_that_does_not_describe_its_object_is_reported(said: str, change: Change | bytes) -> None:
    data = change if isinstance(change, bytes) else header(change)
    with pytest.raises(CheckpointError) as caught:
        decode_header(data[: min(len(data), 8 + int.from_bytes(data[:8], "little"))], OBJECT, len(data))
    assert said in str(caught.value) and str(caught.value).startswith(OBJECT)


def test_a_header_with_too_many_tensors_or_too_large_is_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    one = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
    many = b"{" + b"".join(one % number for number in range(200_000)) + b'"":{}}'
    with pytest.raises(CheckpointError, match="200,001 tensors; at most 100,000 are read"):
        decode_header(len(many).to_bytes(8, "little") + many, OBJECT, len(many) + 8)
    commit = changed(COMMIT, lambda d: d["objects"][1].update(size=10**15, header_size=10**14))
    with replaced(**{COMMIT: commit}) as store:
        assert run(["checkpoints", "show", f"{store}/{NAME}/step-2"]) == 1
        assert "has a header of 100,000,000,000,000 bytes; at most" in capsys.readouterr().err


def test_objects_that_differ_about_a_tensor_are_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = header(lambda d: d["about"]["tensors"][NORM].update(shape=[10**12]))
    with replaced(**{OBJECT: data, COMMIT: commit_with(OBJECT, data)}) as store:
        assert run(["checkpoints", "export", f"{store}/{NAME}", f"{tmp_path}/out"]) == 0
        reported = capsys.readouterr().err
    assert "step 1 is used" in reported and f"{NORM}: is F32 [1000000000000] in" in reported


@pytest.mark.parametrize(("shape", "code"), [([10**12], 1), ([10**18, 0], 0)])
def test_a_shape_that_no_bytes_fill_takes_no_memory(
    shape: list[int], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = TensorEntry("w", "F32", (1, *shape[1:]), 0, 0 if 0 in shape else 4, tuple(shape), (0,) * len(shape))
    data = memoryview(bytes(entry.end))
    whole = encode_header([entry], data, {}) + bytes(data)
    record = record_of(OBJECT, 1, whole)
    commit = replace(Commit.from_bytes(documents()[COMMIT], COMMIT), objects=(record,)).to_bytes()
    tracemalloc.start()
    with replaced(**{OBJECT: whole, COMMIT: commit}) as store:
        place = f"{store}/{NAME}/step-2"
        assert run(["checkpoints", "show", place]) == 0
        assert run(["checkpoints", "diff", place, place]) == code
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()
    if code:
        assert "w: rows 0 to 4194304 are not in the checkpoint exactly once" in capsys.readouterr().err


def test_slices_cover_a_tensor_exactly_once() -> None:
    whole = ((0, 4), (2, 6))
    left, right = ((0, 4), (2, 4)), ((0, 4), (4, 6))
    assert cover_once([left, right], whole) and cover_once([whole], whole) and cover_once([()], ())
    assert not cover_once([left], whole) and not cover_once([left, left], whole)
    assert not cover_once([((0, 3), (2, 6)), ((2, 4), (2, 4))], whole)  # 12 + 4: a gap and an overlap
    grid = [((i, i + 1), (j, j + 1)) for i in range(30) for j in range(30)]
    assert cover_once(grid, ((0, 30), (0, 30)))


def test_a_damaged_job_of_a_run_is_reported() -> None:
    new = parse_job({"name": NAME, "data": {"kind": "synthetic"}})
    for data in (b"[]", b'{"model": 3}', DEEP, b"\xff"):
        with replaced(**{SPEC: data}) as store, pytest.raises(CheckpointError, match=f"{SPEC}: is not a valid job"):
            read_spec(DirectoryStore(store), NAME)
    factors = {"mesh": {"dp_replicate": "a" * 10_000, "fsdp": 10**9}, "pipeline": {"microbatches": {}}}
    problems = check_resume({**factors, "train": {"micro_batch_size": 2}, "data": {"eval": "x"}}, new)
    assert any(problem.key == "pipeline.microbatches" for problem in problems)
    assert max(len(str(problem)) for problem in problems) < 2000
    assert len(check_resume({"model": {str(key): key for key in range(10_000)}}, new)) < 100


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(step="3"), "step is "),
        (lambda d: d.update(updated_at=1e20), "updated_at is"),
        (lambda d: d.update(state="LOST"), "state is "),
        (lambda d: d.update(ranks=[{}]), "ranks[0].rank is missing"),
        (lambda d: d.update(ranks=[{"rank": 0, "coordinates": 3}]), "ranks[0].coordinates is 3"),
        (lambda d: d.update(mesh=[]), "mesh is a list"),
        (lambda d: d.update(error=["x"]), "error is a list"),
        (lambda d: d.clear(), "run is missing"),
    ],
)
def test_a_damaged_status_is_reported(change: Change, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with replaced(**{STATUS: changed(STATUS, change)}) as store:
        assert run(["status", f"{store}/{NAME}"]) == 1
        reported = capsys.readouterr().err
        assert "internal" not in reported and f"{STATUS}: is not a status: {said}" in reported.replace("\n", "")


def test_a_status_of_a_newer_raypp_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    data = changed(STATUS, lambda d: (d.update(colour="red"), d["ranks"][0].update(colour="red")))
    with replaced(**{STATUS: data}) as store:
        assert run(["status", f"{store}/{NAME}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2


LINES = [
    b"", b"3", b"[]", b"null", b"{", b"\xff", DEEP, b'{"step": "1"}', b'{"kind": 3}', b'{"text": 3}', b'{"time": NaN}',
    b'{"kind": "k", "message": "m", "time": "now"}', b'{"kind": "k", "message": "m", "details": []}',
    b'{"kind": "k", "message": "m", "step": -1}', b'{"kind": "k", "message": ["m"]}', b'{"text": "t", "time": 1e300}',
    b'{"text": "t", "label": 3}', b'{"text": "t", "rank": "0"}', b'{"step": 3, "loss": null}', b"9" * 5000,
    b'{"step":1,"loss":"1","grad_norm":1,"tokens":1,"seq_len":1,"step_s":1,"tokens_per_s":1,"attempt":1}',
    b'{"step":1,"loss":1,"grad_norm":1,"tokens":1,"seq_len":1,"step_s":1e99,"tokens_per_s":1,"attempt":1}',
    b'{"step":1,"loss":1,"grad_norm":1,"tokens":1,"seq_len":1,"step_s":1,"tokens_per_s":1,"attempt":1,"extras":{"a":""}}',
]  # fmt: skip


@pytest.mark.parametrize("key", [HISTORY, EVENTS, LOGS])
def test_damaged_lines_are_left_out_and_counted(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = {HISTORY: "history", EVENTS: "events", LOGS: "logs"}[key]
    with replaced(**{key: b"\n".join([*LINES, documents()[key]])}) as store:
        assert run([command, f"{store}/{NAME}"]) == 0
        reported = capsys.readouterr()
    assert f"skipped {len(LINES)} damaged lines" in reported.err
    with replaced() as store:
        assert run([command, f"{store}/{NAME}"]) == 0
    assert capsys.readouterr().out == reported.out


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    (tmp_path / NAME / "logs").mkdir(parents=True)
    with (tmp_path / LOGS).open("wb") as file:
        file.truncate(3 * LONGEST_LINE)
        file.seek(0, 2)
        file.write(b"\n" + documents()[LOGS])
    reader = RunReader(store, NAME)
    assert [line.text for line in reader.logs()] == ["line 0", "line 1", "line 2"]
    assert reader.damaged


@pytest.mark.parametrize(
    "data", [b"", b"3", b"[]", b'{"object": 3}', b'{"facts": {"stall_s": -1, "upload_s": 1}}', DEEP]
)
def test_a_message_about_a_save_is_reported_with_its_rank(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="rank 7's message about step 3"):
        read_announcement(data, 3, 7)


def stored(tail: bytes, header: int, data_size: int = 8) -> StoredSlot:
    return StoredSlot({"rank": 1, "step": 7, "data_size": data_size, "objects": [(0, 8, header)]}, tail)


def test_damaged_snapshots_in_memory_are_reported() -> None:
    header = encode_header([TensorEntry("w", "F32", (2,), 0, 8, (2,), (0,))], memoryview(bytes(8)), {})
    assert stored(header + b"{}", len(header)).files[0].header.entries[0].name == "w"
    for change in ((b'"F32"', b'"F9"'), (b"[0,8]", b"[0,9]"), (b'"shape":[2]', b'"shape":[3]'), (b"blocks", b"block")):
        with pytest.raises(CheckpointError, match="rank 1's snapshot of step 7"):
            stored(header.replace(*change) + b"{}", len(header))
    for tail, size, data_size in ((b"{}", len(header) - 1, 8), (b"{}", len(header), 7), (b"[" * 4000, len(header), 8)):
        with pytest.raises(CheckpointError, match="rank 1's snapshot of step 7"):
            stored(header + tail, size, data_size)
    for extra in ({"data_position": 3}, {"data_position": {"row": -1}}, {"recent_steps": [{}]}):
        with pytest.raises(CheckpointError, match=r"data_position|recent_steps"):
            stored(header + json.dumps(extra).encode(), len(header))
    for control in (
        b"[]",
        b"[" * 4000,
        b'{"data_size": -1}',
        b'{"data_crc": 4294967296}',
        b'{"keeper": [1]}',
        b'{"keeper": [1e99, 0]}',
    ):
        with pytest.raises(ValueError, match="control block"):
            decode_control(control)


def test_names_that_are_no_steps_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("step-٣", "step-1", "step-0000000000000001", "step-", "step-00000001\n", "step-99999999999999999999"):
        (tmp_path / NAME / name).mkdir(parents=True)
        (tmp_path / NAME / name / "COMMIT").write_bytes(b"{}")
    for name in ("spec-007.json", "spec-٣.json", "spec-99999999999999999999.json"):
        (tmp_path / NAME / name).write_bytes(b"3")
    (tmp_path / SPEC).write_bytes(documents()[SPEC])
    assert run(["checkpoints", "list", f"{tmp_path}/{NAME}"]) == 0
    assert "has no committed checkpoint" in capsys.readouterr().out
    assert read_spec(DirectoryStore(tmp_path), NAME)["name"] == NAME
