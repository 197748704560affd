"""Small files travel with a job: no other machine needs the paths that it names."""

import shutil
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from raypp.api import submission
from raypp.control.clusters.dashboard import Dashboard, NodeResources
from raypp.control.clusters.find import Cluster
from raypp.errors import JobError
from raypp.job import small_files
from raypp.job.job_file import JobFile, load_job
from raypp.planning.decide import ON_CPUS
from raypp.planning.schedules.catalogue import schedule_named
from raypp.rank.data.chat_files import open_template
from raypp.rank.data.tokenizer import open_tokenizer
from raypp.state.checkpoint import run_files
from raypp.state.checkpoint.compatibility import check_resume
from raypp.state.checkpoint.run_files import read_run_files, travelling_files, with_run_files, write_run_files
from raypp.state.checkpoint.run_spec import read_spec
from raypp.storage.directory import DirectoryStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DirectoryStore:
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAYPP_CACHE_DIR", str(tmp_path / "cache"))
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def file(tmp_path: Path) -> JobFile:
    """A job beside its tokenizer, its template, its schedule and its model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    mine = tmp_path / "mine"
    (mine / "tok" / "additional_chat_templates").mkdir(parents=True)
    Tokenizer(WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a")).save(str(mine / "tok" / "tokenizer.json"))
    (mine / "tok" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (mine / "tok" / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (mine / "tok" / "chat_template.jinja").write_text("{{ messages }}")
    (mine / "tok" / "weights.safetensors").write_text("not a small file of the tokenizer")
    (mine / "t.jinja").write_text("{{ messages[0].content }}")
    (mine / "order.csv").write_text("0F0,0B0\n")
    (mine / "job.yaml").write_text(
        "name: mine\ndata: {kind: chat, path: rows.jsonl, tokenizer: tok, chat_template: t.jinja}\n"
        "pipeline: {schedule: order.csv, microbatches: 1}\ntrain: {optimizer: {kind: 'my_optimizer:build'}}\n"
    )
    (mine / "my_optimizer.py").write_text("# one\n")
    return load_job(mine / "job.yaml")


class _Accepts(Dashboard):
    package = b""

    def nodes(self) -> list[NodeResources]:
        return []

    def upload_package(self, name: str, data: bytes) -> str:
        self.package = data
        return f"gcs://{name}"

    def submit_job(self, document: dict[str, Any]) -> str:
        return str(document["submission_id"])


def _submitted(file: JobFile, store: DirectoryStore, reported: list[str]) -> bytes:
    dashboard = _Accepts("http://127.0.0.1:1")
    files = travelling_files(file.job, store, False, reported.append)
    cluster = Cluster(dashboard.url, dashboard)
    submission.start(submission.Prepared(file, store, cluster, False, ON_CPUS, {}, files), reported.append)
    return dashboard.package


def test_ranks_open_small_files_from_the_package_as_they_were_submitted(
    file: JobFile, store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    package = _submitted(file, store, reported)
    assert reported[0].startswith(f"with the job travel: data.tokenizer {tmp_path}/mine/tok/tokenizer.json (")
    assert (
        "t.jinja (25 B)" in reported[0]
        and "order.csv (8 B)" in reported[0]
        and "code my_optimizer.py (6 B)" in reported[0]
    )
    shutil.rmtree(tmp_path / "mine")  # as on every other machine
    ZipFile(BytesIO(package)).extractall(tmp_path / "node")
    assert not list((tmp_path / "node").rglob("weights.safetensors"))
    monkeypatch.setattr(small_files, "__file__", str(tmp_path / "node" / "raypp" / "job" / "small_files.py"))
    data = file.job.data
    assert open_tokenizer(data.tokenizer).eos_id == 2
    assert open_template(data) is not None
    assert open_template(data.model_copy(update={"chat_template": None})) is not None  # the one beside the tokenizer
    assert schedule_named(file.job.pipeline.schedule).name


def test_whoever_uses_the_run_elsewhere_gets_the_files_from_its_store(
    file: JobFile, store: DirectoryStore, tmp_path: Path
) -> None:
    _submitted(file, store, [])
    shutil.rmtree(tmp_path / "mine")
    document = with_run_files(store, "mine", read_spec(store, "mine"))
    assert open_tokenizer(document["data"]["tokenizer"]).eos_id == 2
    assert Path(document["data"]["chat_template"]).read_text() == "{{ messages[0].content }}"
    assert schedule_named(document["pipeline"]["schedule"]).name
    assert read_spec(store, "mine")["data"]["tokenizer"] == file.job.data.tokenizer  # the user's own path


def test_a_resume_says_which_files_have_changed_and_stores_the_new_ones(
    file: JobFile, store: DirectoryStore, tmp_path: Path
) -> None:
    _submitted(file, store, [])
    reported: list[str] = []
    assert travelling_files(file.job, store, True, reported.append) == read_run_files(store, "mine")
    assert len(reported) == 1  # nothing has changed
    (tmp_path / "mine" / "tok" / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    (tmp_path / "mine" / "t.jinja").unlink()
    (tmp_path / "mine" / "my_optimizer.py").write_text("# two\n")
    write_run_files(store, "mine", travelling_files(file.job, store, True, reported.append))
    assert reported[-2].startswith(f"note: data.tokenizer {tmp_path}/mine/tok/tokenizer.json has changed since")
    assert reported[-1].startswith("note: your code my_optimizer.py has changed since")
    assert not any(name.endswith("t.jinja") for name in read_run_files(store, "mine"))
    document = with_run_files(store, "mine", read_spec(store, "mine"))
    assert open_tokenizer(document["data"]["tokenizer"]).eos_id == 1


def test_a_resume_compares_the_contents_of_files_wherever_they_are(
    file: JobFile, store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _submitted(file, store, [])
    monkeypatch.setattr(run_files, "list_checkpoints", lambda *_: ["a checkpoint"])
    there, reported = (tmp_path / "mine").rename(tmp_path / "elsewhere"), list[str]()
    tokenizer, template = (there / "tok/tokenizer.json").rename(there / "tok/t.json"), there / "t.jinja"
    moved = load_job(there / "job.yaml", ["data.tokenizer=tok/t.json"]).job
    assert check_resume(read_spec(store, "mine"), moved) == []
    travelling_files(moved, store, True, reported.append)
    assert len(reported) == 1, "nothing has changed"
    tokenizer.write_text(tokenizer.read_text().replace('"b"', '"c"'))
    template.write_text("{{ messages }}")
    (there / "order.csv").write_text("0F0,0B0\n\n")
    with pytest.raises(JobError) as refused:
        travelling_files(moved, store, True, reported.append)
    keys = {problem.key: problem.fault for problem in refused.value.problems}
    assert list(keys) == ["data.tokenizer", "data.chat_template"], "a schedule may change"
    assert keys["data.tokenizer"].startswith(f"{tokenizer} is another than the run began with (digest ")


def test_what_is_too_large_stays_and_is_named(
    file: JobFile, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_files, "MOST_BYTES", 100)
    reported: list[str] = []
    files = travelling_files(file.job, store, False, reported.append)
    assert {name.rpartition("/")[2] for name in files} == {"order.csv", "t.jinja", "your code my_optimizer.py"}
    assert "note: data.tokenizer" in reported[1] and "every node must have it" in reported[1]


@pytest.mark.parametrize("name", ["../../x", "0123456789abcdef/..", "0123456789abcdef/a/b", "x/tokenizer.json"])
def test_names_that_raypp_does_not_give_are_not_written_to_this_machine(name: str, store: DirectoryStore) -> None:
    class Strange(DirectoryStore):
        def list(self, prefix: str = ""):  # type: ignore[no-untyped-def]
            yield type("Info", (), {"key": prefix + name, "size": 1})()

    assert read_run_files(Strange(Path(store.url.removeprefix("file://"))), "mine") == {}
    assert run_files._NAME.fullmatch("0123456789abcdef/tokenizer.json")
