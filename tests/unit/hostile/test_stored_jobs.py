"""Runs of others: their jobs import no code and open no local files, unless the user says so."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hf_folder import write_hf_folder

from raypp.cli.main import run
from raypp.errors import JobError
from raypp.job.availability import CHOICES
from raypp.job.load import job_document, parse_job
from raypp.job.models import DecoderOptions
from raypp.job.paths import resolve_paths
from raypp.job.small_files import stored_name
from raypp.planning.decide import decide
from raypp.records import Event
from raypp.state.checkpoint.commit import job_identity
from raypp.state.checkpoint.known_jobs import NOT_YOURS, guarded, read_job, remember_job
from raypp.state.checkpoint.run_files import write_run_files
from raypp.state.hf.from_hf import hf_options
from raypp.state.hf.import_model import import_hf
from raypp.state.hf.model_files import HfFiles
from raypp.state.run_records.recorder import RunRecorder
from raypp.storage.directory import DirectoryStore
from raypp.tools.export.tokenizer_files import bytes_tokenizer
from raypp.tools.inference.eval_job import data_job
from raypp.tools.inference.source import find_source

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48, "vocab_size": 300}
CANARY = """
from pathlib import Path
Path({touched!r}).touch()
from raypp.planning.schedules.gpipe import build as schedule
from raypp.rank.data.text import read
"""


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that appears if the module `canary_of_others` is imported."""
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAYPP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("RAYPP_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "canary_of_others", raising=False)
    touched = tmp_path / "imported"
    (tmp_path / "canary_of_others.py").write_text(CANARY.format(touched=str(touched)))
    return touched


def stored(folder: Path, **sections: Any) -> tuple[str, dict[str, Any]]:
    write_hf_folder(folder / "hf", **SIZES)
    files = HfFiles(str(folder / "hf"))
    options = hf_options(DecoderOptions(from_hf=files.store.url))
    model = {**options.model_dump(mode="json"), "from_hf": None}
    job = job_document(parse_job({"name": "run", "model": model, **sections}))
    store = DirectoryStore(folder / "store")
    import_hf(files, store, "run", options, job)
    with RunRecorder(store, "run", "a1", interval_s=60) as recorder:
        recorder.event(Event("committed", "step 0", 100.0, 1, 0, 0))
    return f"{store.url}/run", job


def test_a_report_reads_the_pipeline_and_runs_no_schedule_of_others(tmp_path: Path, canary: Path) -> None:
    schedule = "canary_of_others:schedule"
    place, _ = stored(tmp_path, pipeline={"schedule": schedule})
    document = decide(parse_job({"name": "run"})).document()
    document["pipeline"] |= {"schedule": schedule, "stages_of_rank": [[0]]}
    document["job"]["pipeline"]["schedule"] = schedule
    decided = tmp_path / "store" / "run" / "decision-1.json"
    for stages, shown in (([[0]], True), ([[1]], False), ([], False)):
        decided.write_text(json.dumps({**document, "pipeline": {**document["pipeline"], "stages_of_rank": stages}}))
        assert run(["report", place, "--out", "r.html"]) == 0
        page = Path("r.html").read_text()
        assert ("the job cannot be shown in full" not in page) == shown
    assert "stages_of_rank does not name each stage once" in page and not canary.exists()


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"kind": "canary_of_others:read", "path": "s3://bucket/text"}, "data.kind"),
        ({"kind": "text", "path": "/etc/hostname"}, "data.path"),
        ({"kind": "text", "path": "/etc/host*"}, "data.path"),
        ({"kind": "text", "path": "file:///etc/hostname"}, "data.path"),
        ({"kind": "text", "path": "s3://bucket/text", "eval": {"path": "/etc/hostname"}}, "data.path"),
        ({"kind": "mixture", "parts": [{"weight": 1, "kind": "text", "path": "/etc/hostname"}]}, "data.parts[0].path"),
        ({"kind": "text", "path": "s3://bucket/text", "tokenizer": "/etc/hostname"}, "data.tokenizer"),
        ({"kind": "chat", "path": "s3://bucket/c", "chat_template": "/etc/hostname"}, "data.chat_template"),
    ],
)
def test_an_evaluation_reads_no_data_of_others(tmp_path: Path, canary: Path, data: dict[str, Any], key: str) -> None:
    place, _ = stored(tmp_path, data={"tokenizer": "bytes", "seq_len": 64, **data})
    with pytest.raises(JobError, match="--trust uses it") as refused:
        data_job(find_source(place), None, 1)
    assert key in [problem.key for problem in refused.value.problems] and not canary.exists()
    (tmp_path / "mine.txt").write_text("In the beginning\n" * 20)
    if key != "data.tokenizer":
        mine = data_job(find_source(place), "mine.txt", 1)
        assert (mine.data.path, mine.data.kind) == (str(tmp_path / "mine.txt"), "text")
    mine = data_job(find_source(place), "mine.txt", 1, ["data.tokenizer=bytes"])
    assert mine.data.tokenizer == "bytes" and not canary.exists()
    if key == "data.kind":
        (tmp_path / "mine.unknown").write_text("words")
        with pytest.raises(JobError, match="--trust uses it"):
            data_job(find_source(place), "mine.unknown", 1)


def test_an_export_copies_no_file_that_others_name(
    tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("a private line")
    place, job = stored(tmp_path, data={"kind": "text", "tokenizer": "bytes", "chat_template": str(secret)})
    export = ["checkpoints", "export", place]
    assert run([*export, "out"]) == 0
    assert (
        "the chat template was not exported" in (reported := capsys.readouterr().err) and "--trust uses it" in reported
    )
    assert not any("private" in file.read_text(errors="replace") for file in (tmp_path / "out").iterdir())
    assert run([*export, "trusted", "--trust"]) == 0
    assert (tmp_path / "trusted" / "chat_template.jinja").read_text() == "a private line"
    remember_job(job)  # as `raypp submit` does: the run is the user's own
    assert run([*export, "own"]) == 0 and (tmp_path / "own" / "chat_template.jinja").exists()


def test_a_tokenizer_that_others_name_is_not_opened(
    tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, _ = stored(tmp_path, data={"kind": "text", "tokenizer": "/etc/hostname", "path": "x"})
    assert run(["generate", place, "--prompt", "In the"]) == 2
    assert "--trust uses it) /etc/hostname" in capsys.readouterr().err
    assert find_source(place, trust=True).tokenizer == "/etc/hostname"
    assert run(["checkpoints", "export", place, "out"]) == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_only_the_same_files_are_known_of_an_own_job(canary: Path) -> None:
    job = {"name": "a", "data": {"path": "/my/data", "tokenizer": "/my/tokenizer.json"}, "resources": {"env": {}}}
    remember_job(job)
    assert guarded({**job, "name": "b", "mesh": {"pp": 4}}) == {**job, "name": "b", "mesh": {"pp": 4}}
    assert guarded(job_identity(job)) == job_identity(job), "COMMIT holds fewer sections"
    other = {**job, "data": {**job["data"], "path": "/another"}}
    marked = {"path": f"{NOT_YOURS}/another", "tokenizer": f"{NOT_YOURS}/my/tokenizer.json"}
    assert guarded(other)["data"] == marked and guarded(other, trust=True) == other
    harmless = {"kind": "hf", "path": "org/name", "tokenizer": "bytes", "chat_template": "auto", "parts": None}
    document = {"data": harmless, "model": {"from_hf": "s3://bucket/model"}}
    assert guarded(document) == document
    for strange in (["/etc/hostname"], {"path": "/etc/hostname"}, 7, "ftp://host/x", "FILE:///etc/hostname", "~/x"):
        assert guarded({"data": {"tokenizer": strange}})["data"]["tokenizer"].startswith(NOT_YOURS)


def test_every_key_that_names_a_file_or_code_is_withheld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new key of that kind must be added to `known_jobs`."""
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    part = {"weight": 1, "kind": "text", "path": "f"}
    data = {"kind": "mixture", "path": "f", "tokenizer": "f.json", "chat_template": "f", "eval": {"path": "f"}}
    job = parse_job(
        {
            "name": "a", "data": {**data, "parts": [part]},
            "model": {"from_hf": "f"}, "pipeline": {"schedule": "f.csv"}, "checkpoint": {"url": "s3://b/c"},
        }
    )  # fmt: skip
    for name in ("f", "f.json", "f.csv"):
        (tmp_path / name).touch()
    marked = json.dumps(guarded(job_document(resolve_paths(job, tmp_path))))
    assert marked.count(str(tmp_path)) == marked.count(f"{NOT_YOURS}{tmp_path}") == 7
    kinds = {key for key in CHOICES if key.partition(".")[0] in ("model", "data", "pipeline", "train")}
    for key in kinds - {"model.kind"}:
        document: Any = "module:function"
        for name in reversed(key.split(".")):
            document = {name: document}
        assert f"{NOT_YOURS}module:function" in json.dumps(guarded(document))


def test_files_that_the_store_has_are_used_whoever_named_them(tmp_path: Path, canary: Path) -> None:
    """They are the run's own: the paths of the other machine are not looked at."""
    secret = tmp_path / "elsewhere" / "tokenizer.json"
    secret.parent.mkdir()
    secret.write_text("a private line")
    place, _ = stored(tmp_path, data={"kind": "text", "tokenizer": str(secret), "path": "/elsewhere/text"})
    write_run_files(DirectoryStore(tmp_path / "store"), "run", {stored_name(secret): bytes_tokenizer()})
    document = read_job(DirectoryStore(tmp_path / "store"), "run", trust=False)
    assert Path(document["data"]["tokenizer"]).read_bytes() == bytes_tokenizer()
    assert document["data"]["path"] == f"{NOT_YOURS}/elsewhere/text"
    assert find_source(place).open_tokenizer().eos_id == 256
