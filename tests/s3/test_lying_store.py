"""Commands on a store that lies or dies: each lie, and each command, ends soon and in words."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_proxy import FaultProxy, asks, fault_proxy
from hf_folder import write_hf_folder
from lies import LIES, answer, redirect
from seaweed import BUCKET

from raypp.cli.main import run as raypp
from raypp.control.clusters.seaweed import SeaweedServer
from raypp.errors import RayppError
from raypp.records import Event, RunState, StepReport
from raypp.state.run_records.json_lines import LogLine
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RunStatus
from raypp.storage import open_store, s3_listing
from raypp.storage.s3 import S3Store
from raypp.storage.store import Patience, bounded_command

pytestmark = pytest.mark.timeout(120)  # a lie must hold up no command for ever
PREFIX = "lying"
TYPICAL = (
    "a listing of one new key a page", "keys with ..", "bodies without end", "503 for ever", "errors that are a bomb",
)  # fmt: skip
"""One lie of a kind: pages, keys, bodies, statuses, documents. Slow tests tell all."""
COMMANDS = {
    "status": ["status", "RUN"],
    "history": ["history", "RUN"],
    "events": ["events", "RUN"],
    "logs": ["logs", "RUN"],
    "list": ["checkpoints", "list", "RUN"],
    "show": ["checkpoints", "show", "RUN"],
    "verify": ["checkpoints", "verify", "RUN"],
    "export": ["checkpoints", "export", "RUN", "OUT"],
    "submit": [],
}


@pytest.fixture(scope="module")
def place(seaweed_server: SeaweedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    """A proxy before a store with a run: its records, and a checkpoint of a model."""
    folder = tmp_path_factory.mktemp("lying")
    with fault_proxy(seaweed_server.endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in seaweed_server.environment().items():
            patch.setenv(name, value)
        patch.setenv("RAYPP_HOME", str(folder / "home"))
        patch.delenv("RAYPP_ADDRESS", raising=False)
        sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "ffn_size": 24, "vocab_size": 100}
        write_hf_folder(folder / "hf", **sizes)
        assert raypp(["checkpoints", "import", str(folder / "hf"), f"s3://{BUCKET}/{PREFIX}/model"]) == 0
        store = open_store(f"s3://{BUCKET}/{PREFIX}")
        with RunRecorder(store, "model", "a1") as recorder:
            recorder.step(StepReport(1, 2.0, 0.5, 1000, 64, 0.1, 10000.0, 1))
            recorder.event(Event("submitted", "sent to the cluster", 100.0))
            recorder.log(LogLine("hello", 0, "pp0", 1, time=1.0))
            recorder.status(RunStatus("model", RunState.SUCCEEDED, 1, 1))
        patch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        patch.setenv("RAYPP_STORE_PATIENCE_S", "0.3")
        patch.setenv("RAYPP_STORE_TIMEOUT_S", "0.3")
        patch.setattr(s3_listing, "MOST_LISTED", 10_000)  # a million objects take half a minute
        yield proxy


@pytest.fixture(autouse=True)
def _truthful(place: FaultProxy) -> Iterator[None]:
    yield
    place.clear()


def command(name: str, out: Path) -> int:
    """Runs a command; for `submit`, its questions to the store, which a cluster would precede."""
    if name != "submit":
        words = {"RUN": f"s3://{BUCKET}/{PREFIX}/model", "OUT": str(out)}
        return raypp([words.get(word, word) for word in COMMANDS[name]])
    with bounded_command():
        store = open_store(f"s3://{BUCKET}/{PREFIX}")
        try:
            store.probe()
            store.limitations()
            store.head("model/spec.json")
        except RayppError as error:
            assert error.problems[0].key and error.problems[0].fault
            return error.exit_code
    return 0


@pytest.mark.gate
def test_every_command_succeeds_on_the_store_when_it_does_not_lie(
    place: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPP_STORE_PATIENCE_S", "30")
    monkeypatch.setenv("RAYPP_STORE_TIMEOUT_S", "30")
    assert {name: command(name, tmp_path / "out") for name in COMMANDS} == dict.fromkeys(COMMANDS, 0)


def tell(
    place: FaultProxy, lie: str, commands: list[str], out: Path, capsys: pytest.CaptureFixture[str]
) -> list[tuple[str, int, str]]:
    place.add(LIES[lie][0], times=None, lie=LIES[lie][1])
    answers = []
    for name in commands:
        capsys.readouterr()
        code = command(name, out / name)
        text = capsys.readouterr()
        both = text.out + text.err
        assert code in (0, 1, 2, 3) and "internal error" not in both and "Traceback" not in both, (name, both)
        assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in both), (name, both)
        answers.append((name, code, both))
    return answers


@pytest.mark.parametrize("lie", TYPICAL)
def test_a_lie_ends_commands_soon_and_in_words(
    lie: str, place: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command per lie, in turns."""
    tell(place, lie, [list(COMMANDS)[TYPICAL.index(lie)]], tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_ends_a_command_that_reads_all_soon_and_in_words(
    lie: str, place: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(place, lie, ["verify"], tmp_path, capsys)


@pytest.mark.gate
def test_an_error_says_how_often_and_how_long_the_store_was_asked(
    place: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPP_STORE_PATIENCE_S", "2")
    [(_, code, output)] = tell(place, "503 for ever", ["verify"], tmp_path, capsys)
    assert code == 3 and re.search(r"tried \d+ times in \d+ s", output), output


@pytest.mark.gate
@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("a listing that continues with the same token", "does not end"),
        ("a listing of one new key a page", "does not end"),
        ("listed sizes below 0", "does not say how large"),
        ("listings of another kind", "is not a listing"),
        ("bodies of another range", "were asked for"),
        ("redirects to itself (302)", "answered 302"),
        ("errors with control characters", r"Bad\\x9b"),
    ],
)
def test_an_error_names_the_lie(
    lie: str, words: str, place: FaultProxy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYPP_STORE_TIMEOUT_S", "5")
    if "range" in lie:  # much comes before the lie is seen, which takes long on a busy machine
        monkeypatch.setenv("RAYPP_STORE_PATIENCE_S", "3")
    [(_, code, output)] = tell(place, lie, ["logs" if "range" in lie else "list"], Path(), capsys)
    assert code == 3
    assert re.search(words, " ".join(output.split())), output


def test_a_redirect_takes_no_credentials_elsewhere(
    place: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fault_proxy(place.upstream) as elsewhere:
        for status in (301, 302, 307, 308):
            place.add(lambda _: True, times=None, lie=redirect(status, elsewhere.endpoint))
            assert command("status", tmp_path) == 3
            place.clear()
        assert not elsewhere.seen


@pytest.mark.gate
def test_training_stays_as_patient_as_it_was(place: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails for longer than a command waits is asked until it answers."""
    monkeypatch.setenv("RAYPP_STORE_PATIENCE_S", "20")
    store = open_store(f"s3://{BUCKET}/{PREFIX}")
    assert isinstance(store, S3Store)
    assert store.patience == Patience(20.0, 20.0)
    fault = place.add(lambda _: True, times=3, status=503, code="SlowDown")
    assert store.head("model/spec.json") is not None
    assert fault.hits == 3


@pytest.mark.gate
def test_a_large_object_is_read_in_ranges_from_a_server_that_ignores_ranges(place: FaultProxy) -> None:
    store = open_store(f"s3://{BUCKET}/{PREFIX}")
    store.put("numbers", bytes(range(256)) * 1000)
    place.add(asks("GET"), times=None, lie=lambda client, _, __: answer(client, 200, {}, bytes(range(256)) * 1000))
    assert store.get("numbers", 1000, 1010) == bytes(range(232, 242))
    assert store.get("numbers", 255_990) == bytes(range(246, 256))
    assert store.get("numbers", 255_999, 300_000) == b"\xff"
    assert store.get("numbers", 256_000, 300_000) == b""


@pytest.mark.gate
def test_an_object_that_is_being_written_is_listed_when_it_is_whole(
    place: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rclone lists objects without a time while they are written or deleted."""
    monkeypatch.setenv("RAYPP_STORE_PATIENCE_S", "20")
    monkeypatch.setenv("RAYPP_STORE_TIMEOUT_S", "20")
    wanted, lie = LIES["entries without a time"]
    fault = place.add(wanted, times=3, lie=lie)
    assert "model/spec.json" in [info.key for info in open_store(f"s3://{BUCKET}/{PREFIX}").list("model/")]
    assert fault.hits == 3
