"""Which names and which steps `raypp submit` accepts, and when a new run takes its name."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qs
from zipfile import ZipFile

import hostile_world as hostile
import pytest

from raypp.api import submission
from raypp.api.checked_job import checked
from raypp.api.submission import JobWatch, Prepared
from raypp.cli import run_commands
from raypp.cli.output import say
from raypp.control.client import facts_of, submit_run
from raypp.control.clusters import known_runs
from raypp.control.clusters.dashboard import Dashboard, NoAnswerError, NodeResources
from raypp.control.clusters.find import Cluster
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.find_run import find_run, follow, present_status
from raypp.control.protocol import REQUEST_FILE, RunRequest
from raypp.errors import JobError, Problem, UnreachableError
from raypp.job.job import Job
from raypp.job.job_file import JobFile, load_job
from raypp.job.load import job_document, parse_job
from raypp.planning.decide import ON_CPUS
from raypp.records import RunState
from raypp.state.checkpoint.layout import commit_key
from raypp.state.checkpoint.run_spec import RunEnd, read_spec, write_spec
from raypp.state.run_records.json_lines import document
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.status import RunStatus
from raypp.storage import ObjectStore, StoreError
from raypp.storage.directory import DirectoryStore


class _AtUpload(Dashboard):
    """A cluster at which something happens when the package arrives."""

    def __init__(self, happens: Callable[[], None], accepts: bool, url: str) -> None:
        super().__init__(url)
        self._happens, self._accepts = happens, accepts

    def nodes(self) -> list[NodeResources]:
        return []

    def upload_package(self, name: str, data: bytes) -> str:
        self._happens()
        return f"gcs://{name}"

    def submit_job(self, document: dict[str, Any]) -> str:
        return str(document["submission_id"]) if self._accepts else super().submit_job(document)


@pytest.fixture
def submit(tmp_path: Path, store: DirectoryStore) -> Callable[..., RunPlace]:
    def start(at_upload: Callable[[], None], accepts: bool = False, url: str = "http://127.0.0.1:1") -> RunPlace:
        dashboard = _AtUpload(at_upload, accepts, url)
        cluster = Cluster(dashboard.url, dashboard)
        return submission.start(Prepared(load_job(job_file(tmp_path)), store, cluster, False, ON_CPUS, {}), say)

    return start


def test_the_controller_gets_the_memory_of_the_smallest_gpu(tmp_path: Path) -> None:
    class Gpus(_AtUpload):
        request: dict[str, Any]

        def nodes(self) -> list[NodeResources]:
            gpus = [(0, 0), (8, 24 << 30), (8, 0), (8, 80 << 30)]
            return [
                NodeResources(f"{n}", f"10.0.0.{n}", "", 9, gpu, 9, gpu, size) for n, (gpu, size) in enumerate(gpus)
            ]

        def upload_package(self, name: str, data: bytes) -> str:
            with ZipFile(BytesIO(data)) as package:
                self.request = json.loads(package.read(REQUEST_FILE))
            return super().upload_package(name, data)

    dashboard = Gpus(lambda: None, True, "http://127.0.0.1:1")
    facts = facts_of("cuda", dashboard.nodes())
    submit_run(load_job(job_file(tmp_path)).job, Cluster(dashboard.url, dashboard), "file:///store", facts=facts)
    assert RunRequest(**dashboard.request).facts["memory"] == 24 << 30


def test_ctrl_c_during_the_upload_leaves_the_name_free(submit, store: DirectoryStore) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        submit(interrupt)
    assert list(store.list("")) == []


def test_the_slower_of_two_submissions_of_a_name_is_refused_as_a_wrong_argument(submit, store: DirectoryStore) -> None:
    with pytest.raises(JobError, match=r"job\.yaml:1 name: a run named 'mine' already exists") as caught:
        submit(lambda: write_spec(store, "mine", {"name": "mine", "model": {"kind": "the other's"}}) and None)
    assert caught.value.exit_code == 2
    assert read_spec(store, "mine")["model"] == {"kind": "the other's"}


def test_a_cluster_that_does_not_accept_the_run_leaves_the_name_free(submit, store: DirectoryStore) -> None:
    with pytest.raises(UnreachableError):
        submit(lambda: None)
    assert list(store.list("")) == []


def cluster_that_does_not_answer(jobs: set[str], status: int = 0, later: int = 0) -> AbstractContextManager[str]:
    """Serves a dashboard that reads a new job, hangs up, then knows these jobs; yields its URL."""

    def respond(method: str, path: str, _: bytes) -> tuple[int, bytes]:
        known = path.removeprefix("/api/jobs/").rsplit("-", 3)[0] in jobs
        return (status, b"") if method == "POST" else (later or (200 if known else 404), b"{}")

    return hostile.answering(respond)


@pytest.mark.parametrize("status", [0, 502, 503, 504])
def test_a_run_is_followed_if_the_cluster_has_it_although_its_answer_was_lost(
    submit, store: DirectoryStore, status: int
) -> None:
    with cluster_that_does_not_answer({"raypp-mine"}, status) as url:
        assert submit(lambda: None, url=url).submission_id.startswith("raypp-mine-")


@pytest.mark.parametrize(
    ("status", "later"),
    [
        pytest.param(0, 0, id="the cluster does not have it yet"),
        pytest.param(0, 500, id="the cluster cannot be asked"),
        pytest.param(504, 504, id="a proxy gets no answer"),
    ],
)
def test_a_run_that_the_cluster_may_have_keeps_its_name(submit, store: DirectoryStore, status: int, later: int) -> None:
    with (
        cluster_that_does_not_answer(set(), status, later) as url,
        pytest.raises(UnreachableError, match=r"(?s)the cluster may have accepted the run 'mine'.*--resume"),
    ):
        submit(lambda: None, url=url)
    assert read_spec(store, "mine")["name"] == "mine"


def test_an_answer_that_is_lost_before_the_run_is_submitted_leaves_the_name_free(submit, store: DirectoryStore) -> None:
    def lost() -> None:
        raise NoAnswerError(Problem("address", "no Ray cluster answers: timed out"))

    with pytest.raises(UnreachableError) as caught:
        submit(lost)
    assert "accepted" not in str(caught.value)
    assert list(store.list("")) == []


def test_a_run_that_the_cluster_accepted_is_followed_although_the_home_cannot_be_written(
    submit, store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "file" / "home"))
    assert submit(lambda: None, accepts=True).submission_id.startswith("raypp-mine-")
    assert read_spec(store, "mine")["name"] == "mine"
    printed = capsys.readouterr().err
    assert printed.startswith("warning: this machine does not remember the run: cannot write")
    assert printed.endswith(f"name it as {store.url}/mine\n")


@pytest.mark.parametrize(("steps", "fits"), [(20, True), (19, False)])
def test_a_run_resumes_with_no_fewer_steps_than_its_newest_checkpoint_has(
    tmp_path: Path, store: DirectoryStore, steps: int, fits: bool
) -> None:
    file = load_job(job_file(tmp_path), [f"train.steps={steps}"])
    write_spec(store, "mine", job_document(file.job))
    store.put(commit_key("mine", 20), b"")
    if fits:
        submission._check_name(file, store, True, say)
        return
    with pytest.raises(JobError, match=r"train\.steps: is 19, but the run is at step 20"):
        submission._check_name(file, store, True, say)


class _Idle(Dashboard):
    def nodes(self) -> list[NodeResources]:
        return [NodeResources("n", "10.0.0.1", "", 9, 0, 9, 0)]

    def check_versions(self) -> dict[str, str]:
        return {}


@pytest.fixture
def on_an_idle_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("http://127.0.0.1:1", _Idle("http://127.0.0.1:1"))
    monkeypatch.setattr(submission, "find_cluster", lambda address: cluster)
    monkeypatch.setattr(submission, "_check_not_running", lambda *_: None)
    monkeypatch.setattr(submission, "line_exists", lambda _: False)


def job_file(tmp_path: Path, store: ObjectStore | None = None, more: str = "") -> Path:
    """A file with the job `mine`; with a store, its checkpoints go there."""
    path, saves = tmp_path / "job.yaml", f"checkpoint: {{url: {store.url}, every_steps: 40}}\n" if store else ""
    path.write_text(f"name: mine\ndata: {{kind: synthetic}}\n{saves}{more}")
    return path


def decided(asked: JobFile, store: ObjectStore, before: Job | None, word: str) -> tuple[list[str], Prepared]:
    """Returns what a first submission or a resume reports with a word, and what it decides."""
    if before:
        write_spec(store, "mine", job_document(before))
        store.put(commit_key("mine", 20), b"")
    reported: list[str] = []
    prepared = submission.prepare(asked, None, before is not None, reported.append)
    return [words for words in reported if word in words], prepared


@pytest.mark.usefixtures("on_an_idle_cluster")
@pytest.mark.parametrize(("recorded", "line"), [(None, "fp32 on CPUs"), ("bf16", "bf16, as before")])
def test_a_submission_decides_precision_and_says_so(
    tmp_path: Path, store: ObjectStore, recorded: str | None, line: str
) -> None:
    asked = load_job(job_file(tmp_path, store))
    before = asked.job.with_precision(recorded) if recorded else None
    reported, prepared = decided(asked, store, before, "precision")
    assert reported == [f"train.precision: auto is {line}"]
    assert prepared.file.job.train.precision == line.split()[0].rstrip(",") and prepared.facts.device == "cpu"


@pytest.mark.usefixtures("on_an_idle_cluster")
@pytest.mark.parametrize(
    ("recorded", "gbps", "line"), [(None, 1.0, "10"), (None, 1e-6, "40"), (20, None, "20, as before")]
)
def test_a_submission_decides_the_steps_between_outer_steps_and_a_resume_keeps_them(
    tmp_path: Path, store: ObjectStore, recorded: int | None, gbps: float | None, line: str
) -> None:
    outer = "mesh: {dp_replicate: 2}\ntrain: {steps: 200, sync: {kind: outer, every_steps: auto}}\n"
    asked = load_job(job_file(tmp_path, store, outer), [f"train.sync.link_gbps={gbps}"] if gbps else [])
    before = asked.job.with_every_steps(recorded) if recorded else None
    reported, prepared = decided(asked, store, before, "sync")
    assert reported == [f"train.sync.every_steps: auto is {line}"]
    assert prepared.file.job.train.sync.every_steps == int(line.split(",")[0])


@pytest.mark.usefixtures("on_an_idle_cluster")
def test_a_job_that_does_not_fit_the_device_it_gets_is_refused_at_submission(
    tmp_path: Path, store: ObjectStore
) -> None:
    file = checked(load_job(job_file(tmp_path, store), ["train.reduce_dtype=bf16"]))
    with pytest.raises(JobError, match=r"--set train\.reduce_dtype=bf16.*bf16 sums would lose"):
        submission.prepare(file, None, False, lambda words: None)


class _JobFailed(Dashboard):
    def job(self, submission_id: str) -> dict[str, Any] | None:
        return {"status": "FAILED", "message": "the words of the driver", "driver_exit_code": 4}


@pytest.mark.parametrize(("recorded", "code"), [(False, 4), (True, 2)])
def test_the_words_of_a_driver_are_shown_whose_run_recorded_no_end(
    capsys: pytest.CaptureFixture[str], recorded: bool, code: int
) -> None:
    """A run without a sign of life counts as failed before its Ray job is known to be over."""
    dashboard = _JobFailed("http://127.0.0.1:1")
    watch = JobWatch(Cluster(dashboard.url, dashboard), RunPlace("/store", "a", dashboard.url, "job"))
    end = RunEnd("a", RunState.FAILED, 2, 3, reason="wrong") if recorded else None
    assert watch.exit_code(end, say) == code
    assert ("the words of the driver" in capsys.readouterr().err) is not recorded


@contextmanager
def cluster_with(
    jobs: Sequence[tuple[str, str, str]] = (), controllers: Sequence[tuple[str, str]] = ()
) -> Iterator[Cluster]:
    """Serves a dashboard that knows these Ray jobs and controllers of runs named `mine`."""
    listed = [
        {"job_id": job, "submission_id": f"raypp-{job}", "status": state,
         "metadata": {"raypp_run": "mine", "raypp_url": url}}
        for job, url, state in jobs
    ]  # fmt: skip
    actors = [{"state": state, "name": f"raypp/{known_runs.cluster_name(url, 'mine')}"} for state, url in controllers]
    node = {"state": "ALIVE", "nodeId": "n", "resourcesTotal": {"CPU": 64}}
    answers: dict[str, Any] = {
        "/api/version": {"ray_version": version("ray")},
        "/api/jobs/": listed,
        "/nodes": {"data": {"summary": [{"raylet": node}]}},
    }

    def respond(_: str, target: str, __: bytes) -> tuple[int, bytes]:
        path, _, query = target.partition("?")
        answer = answers.get(path, {})
        if path == "/api/v0/actors":
            (name,) = parse_qs(query)["filter_values"]
            answer = {"data": {"result": {"result": [actor for actor in actors if actor["name"] == name]}}}
        return 200, json.dumps(answer).encode()

    with hostile.answering(respond) as url:
        yield Cluster(url, Dashboard(url))


def silent(store: DirectoryStore, address: str, seconds: float = 8.0) -> RunPlace:
    status = RunStatus("mine", RunState.RUNNING, 4, 9, updated_at=time.time() - seconds)
    store.put("mine/status.json", document(status.as_dict()))
    return RunPlace(store.url, "mine", address)


def test_a_cluster_that_is_gone_is_noticed_before_ten_seconds_and_named(store: DirectoryStore) -> None:
    with cluster_with() as cluster:
        pass  # it listens no more
    place, reader = silent(store, cluster.address), RunReader(store, "mine")
    status = present_status(place, reader)
    assert status["state"] == "FAILED" and f"no Ray cluster answers at {cluster.address}" in status["error"]
    assert "it was RUNNING" in status["error"] and "--resume" in status["error"]

    def away() -> None:
        raise StoreError("no answer")

    lost = SimpleNamespace(status=away, store=store)
    with pytest.raises(
        UnreachableError, match=f"the run's cluster is gone: no Ray cluster answers at {cluster.address}"
    ):
        next(follow(place, cast(RunReader, lost), lambda: False, 0.01))


HERS = "s3://hers/runs"


def test_a_run_of_that_name_in_another_store_is_another_run(store: DirectoryStore) -> None:
    with cluster_with([("01", HERS, "RUNNING")], [("ALIVE", HERS)]) as cluster:
        assert known_runs.controller_alive(RunPlace(store.url, "mine", cluster.address)) is False
        assert known_runs.controller_alive(RunPlace(HERS, "mine", cluster.address)) is True
        submission._check_not_running(parse_job({"name": "mine"}), store, cluster)
    with cluster_with([("01", HERS, "FAILED"), ("02", store.url, "RUNNING")]) as cluster:
        assert known_runs.controller_alive(RunPlace(f"{store.url}/", "mine", cluster.address)) is True
        assert known_runs.controller_alive(RunPlace(HERS, "mine", cluster.address)) is False


def test_a_name_means_the_active_run_or_the_newest_unless_several_are_active(store: DirectoryStore) -> None:
    def remember(cluster: Cluster) -> None:
        for seconds, url in enumerate((HERS, store.url)):
            known_runs.remember_run(RunPlace(url, "mine", cluster.address, "", float(seconds)))

    both = [("01", HERS, "RUNNING"), ("02", store.url, "RUNNING")]
    with cluster_with(both, [("ALIVE", HERS), ("ALIVE", store.url)]) as cluster:
        remember(cluster)
        with pytest.raises(JobError, match=rf"2 runs named 'mine' are active\n.*use {store.url}/mine or {HERS}/mine"):
            known_runs.locate_run("mine")
        assert known_runs.locate_run(f"{HERS}/mine").url == HERS
    for active in (HERS, store.url):
        with cluster_with(controllers=[("ALIVE", active)]) as cluster:
            remember(cluster)
            assert known_runs.locate_run("mine").url == active
    with cluster_with() as cluster:
        remember(cluster)
        assert known_runs.locate_run("mine").url == store.url


def test_a_url_is_compared_in_the_form_of_its_store(tmp_path: Path, store: DirectoryStore) -> None:
    write_spec(store, "mine", {"name": "mine"})
    place, _ = find_run(f"file://{tmp_path}/store//mine")
    assert (place.url, place.name) == (store.url, "mine")


def test_a_dry_run_prints_one_json_object_on_standard_output(
    store: DirectoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster_with() as cluster:
        arguments = [
            str(job_file(tmp_path, store)),
            "--dry-run",
            "--json",
            "--address",
            cluster.address,
            "--name",
            "other",
        ]
        run_commands.submit_command.main(arguments, standalone_mode=False)
    printed = capsys.readouterr()
    reported = json.loads(printed.out)
    assert (reported["run"], reported["job_id"], reported["url"]) == ("other", None, store.url)
    assert reported["address"] == cluster.address
    assert "nothing was started" in printed.err
