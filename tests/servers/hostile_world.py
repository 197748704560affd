"""Stores, files and answers in which every text is hostile, and the commands that show them."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from raypp.control.clusters.known_runs import RunPlace
from raypp.records import Coordinates, Event, RunState, StepReport
from raypp.state.checkpoint.commit import Commit, ObjectRecord
from raypp.state.checkpoint.layout import commit_key, rank_key
from raypp.state.checkpoint.tensor_file import TensorEntry, encode_header
from raypp.state.run_records.json_lines import LogLine, document
from raypp.state.run_records.recorder import RunRecorder
from raypp.state.run_records.status import RankStatus, RunStatus
from raypp.state.run_records.trace import RankTrace, Span
from raypp.storage.directory import DirectoryStore

MARK = "zqx"
"""In every hostile text, so that a test sees that the text was shown."""

TEXTS = {
    "title": f"{MARK}\x1b]0;owned\x07",
    "clear": f"{MARK}\x1b[2J\x1b[H\x1bc\x1b[?1049h",
    "colour": f"{MARK}\x1b[38;5;201mpink",
    "link": f"{MARK}\x1b]8;;file:///etc/passwd\x1b\\click\x1b]8;;\x1b\\",
    "c1": f"{MARK}\x9b31m\x9d0;owned\x9c\x84\x85\x8d",
    "bells": f"{MARK}\x07\x08\x08\x08\x7f\x0e\x0f\x05\x00",
    "return": f"{MARK}\rFORGED\x0b\x0cFORGED",
    "lines": f"{MARK}\nFORGED  fix: rm -rf ~\r\nFORGED\u2028FORGED\x85FORGED\x1cFORGED",
    "tab": f"{MARK}\tx\t\ty",
    "markup": f"{MARK}[red]x[/red][link=file:///etc/passwd]y[/link]:warning:",
    "broken markup": f"{MARK}[/nothing][/][[red]\\[bold",
    "bidi": f"{MARK}\u202egnp.\u2066x\u2069\u200f\u061c",
    "invisible": f"{MARK}\u200b\u2060\ufeff\u00ad\U000e0041\u3164",
    "surrogate": f"{MARK}\udcff\ud800",
    "wide": f"{MARK}{'漢字🚀' * 100}",
    "combining": f"{MARK}{'é́' * 500}",
    "long": f"{MARK}{'x' * 5_000}",
    "shell": f"{MARK}$(touch owned)`touch owned`;'\"& touch owned #",
    "html": f"{MARK}<script>alert(1)</script><b>&amp;",
    "format": f"{MARK}%s%n%1000000d{{0}}{{x}}\\x41",
}

_SGR = re.compile(r"\x1b\[[0-9;]*m")
_LIVE = re.compile(r"\x1b\[(\?25[lh]|\d*[AGK]|2K)|\r(?!FORGED)")


def faults(output: str, *, coloured: bool = False, live: bool = False) -> list[str]:
    """Returns what must not be in a command's output, which may use colours or move the cursor."""
    found = [word for word in ("MarkupError", "Traceback", "internal error") if word in output]
    if coloured:
        if "\x1b[38;5;201m" in output:
            found.append("a colour of others")
        output = _SGR.sub("", output)
    if live:
        output = _LIVE.sub("", output)
    unsafe = r"[^\S \t\n]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
    found += sorted({f"{one!r}" for one in re.findall(f"{unsafe}|[\ud800-\udfff\U000e0000-\U000e007f]", output)})
    found += [f"a forged line {line[:40]!r}" for line in output.split("\n") if line.startswith("FORGED")]
    return found


def write_run(store: DirectoryStore, name: str, text: str) -> None:
    """Writes the records and a checkpoint of a run that contain a text wherever they can."""
    ranks = tuple(RankStatus(rank, Coordinates(pp=rank), text, 100 + rank, text) for rank in range(2))
    mesh = {"pp": 2, "dp_replicate": 1, "fsdp": 1, "cp": 1, "tp": 1, "ep": 1}
    status = RunStatus(
        text, RunState.FAILED, 2, 10, 2.5, 1e4, 1, 0, f"{store.url}/{text}", {**mesh, text: 2}, ranks, text
    )
    cut = text.partition("\n")[0]
    with RunRecorder(store, name, "a1", interval_s=60) as recorder:
        for step in (1, 2):
            recorder.step(StepReport(step, 2.5, 0.5, 1000, 64, 0.1, 1e4, 1, extras={text: 1.0}))
        recorder.event(Event("submitted", text, 100.0))
        recorder.event(Event(text, text, 200.0, 1, 3, 1, text, {"cause": text, text: text, "loss": 1.0}))
        recorder.log(LogLine(cut, 0, "pp0", 1, time=1.0))
        recorder.log(LogLine(text, 1, text, 1, time=2.0))
    store.put(f"{name}/status.json", document({**status.as_dict(), "updated_at": time.time()}))
    store.put(f"{name}/spec.json", json.dumps({"name": text, "model": {"kind": text, text: text}}).encode())
    for rank in range(2):
        spans = (Span(text[:40], 0.0, 1.0, 1), Span("F", 0.0, 1.0, 1, rank, 0), Span("step", 0.0, 1.0, 1))
        trace = RankTrace(name, 1, 1, 1, rank, 2, text, Coordinates(pp=rank), text, text, 1.0, 0.0, spans)
        store.put(trace.key(), trace.to_bytes())
    _write_checkpoint(store, name, text, mesh)


def _write_checkpoint(store: DirectoryStore, name: str, text: str, mesh: dict[str, int]) -> None:
    names = [text, f"optim/{text}", f"{name}.{text}", f"layers.0.{text}"]
    data = b"".join((hash_ + bytes(8))[:8] for hash_ in (name.encode(), *(b"same",) * 3))
    entries = [
        TensorEntry(one, "F32", (2,), 8 * place, 8 * place + 8, (2,), (0,), text) for place, one in enumerate(names)
    ]
    header = encode_header(entries, memoryview(data), {"run": text})
    key = rank_key(name, 3, 1, 0)
    store.put(key, header + data)
    record = ObjectRecord(
        key, len(header + data), hashlib.sha256(header + data).hexdigest(), 0, len(header),
        hashlib.sha256(header).hexdigest(),
    )  # fmt: skip
    commit = Commit(name, 3, 1, {**mesh, text: 2}, {"model": {"kind": text}}, {"data_position": text}, (record,))
    store.put(commit_key(name, 3), json.dumps(asdict(commit)).encode())
    bad = asdict(commit) | {"run": text, "step": 4, "objects": [{**asdict(record), "key": text}]}
    store.put(commit_key(name, 4), json.dumps(bad).encode())


def write_world(folder: Path, home: Path, text: str) -> None:
    store = DirectoryStore(folder / "s")
    for name in ("a", "b"):
        write_run(store, name, text)
    name_of_folder = text.replace("\0", "").replace("/", "")[:60].encode("utf-8", "surrogatepass")
    other = folder / "s" / os.fsdecode(name_of_folder)
    other.mkdir(parents=True)
    (other / "spec.json").write_text("{}")
    (home / "runs").mkdir(parents=True)
    for number, place in enumerate(
        (RunPlace(str(folder / "s"), "a", None, text, 1.0), RunPlace(text, text, None, text, 2.0))
    ):
        (home / "runs" / f"{'a' if not number else 'other'}.json").write_text(json.dumps(asdict(place)))
    hf = folder / "hf"
    hf.mkdir()
    config = {"architectures": [text], "model_type": text, "hidden_act": text, "torch_dtype": text, text: text}
    (hf / "config.json").write_text(json.dumps(config))
    header = json.dumps({text: {"dtype": text, "shape": [2], "data_offsets": [0, 8]}}).encode()
    (hf / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    quoted = json.dumps(text)
    sizes = "num_layers: 2, hidden_size: 16, num_heads: 2, num_kv_heads: 1, ffn_size: 24, vocab_size: 300"
    for name, lines in {
        "values": [f"name: {quoted}", f"model: {{kind: {quoted}, {sizes}}}", f"data: {{kind: {quoted}}}"],
        "keys": ["name: a", f"{quoted}: 1", f"model: {{{sizes}, {quoted}: 1}}", "data: {kind: synthetic}"],
        "paths": ["name: a", f"model: {{{sizes}}}", f"data: {{kind: text, path: {quoted}, tokenizer: {quoted}}}",
                  f"checkpoint: {{url: {quoted}}}"],
        "hf": ["name: a", "model: {from_hf: hf}", "data: {kind: synthetic}"],
        "raw": [f"name: {text}", text, f"  {text}: ["],
        "good": ["name: a", f"model: {{{sizes}}}", "data: {kind: synthetic}", "checkpoint: {url: s}"],
    }.items():  # fmt: skip
        (folder / f"{name}.yaml").write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    (folder / "costs.json").write_text(json.dumps({"device": text, "version": text, text: text}))
    (folder / "links.json").write_text(json.dumps({"nodes": [{"name": text, text: 1}], "links": text, text: text}))


def commands(text: str) -> list[list[str]]:
    given = os.fsdecode(text.replace("\0", "")[:3000].encode("utf-8", "surrogatepass"))
    return [
        ["status", "a"], ["status", "s/b"], ["events", "a"], ["logs", "a"], ["list"], ["status", f"s/{given}"],
        ["checkpoints", "list", "s/a"], ["checkpoints", "show", "s/a"], ["checkpoints", "show", "--all", "s/a/step-3"],
        ["checkpoints", "diff", "s/a/step-3", "s/b/step-3"], ["checkpoints", "verify", "s/a"],
        ["checkpoints", "export", "s/a/step-3", "out"], ["checkpoints", "export", "s/a", given],
        ["checkpoints", "import", "hf", "s/new"], ["checkpoints", "import", "hf", "good.yaml"],
        ["checkpoints", "prune", "s/b", "--keep", "1", "--dry-run"], ["checkpoints", "show", f"s/{given}/step-3"],
        ["plan", "values.yaml"], ["plan", "keys.yaml"], ["plan", "paths.yaml"], ["plan", "hf.yaml"],
        ["plan", "raw.yaml"], ["plan", given], ["plan", "good.yaml", "--set", f"name={given}"],
        ["plan", "good.yaml", "--set", given], ["plan", "good.yaml", "--costs", "costs.json"],
        ["plan", "good.yaml", "--links", "links.json"], ["plan", "good.yaml", "--device", given],
        ["submit", "good.yaml", "--dry-run", "--address", given], ["explain", given], ["list-kinds", given],
        ["init", given], [given], ["status", f"--{given}"], ["save", given], ["stop", given], ["doctor", given],
        ["timeline", "a", "--recorded", "--out", "t.json"], ["report", "a", "--out", "r.html"], ["report", given],
        ["report", "a", "s/b", "--out", "r.html"], ["timeline", given], ["report", "a", "--out", f"{given}/"],
    ]  # fmt: skip


def json_commands(text: str) -> list[list[str]]:
    """Returns the commands that print JSON about a world: one value, or one on each line."""
    return [
        ["status", "a", "--json"], ["events", "a", "--json"], ["history", "a"], ["list", "--json"],
        ["checkpoints", "list", "s/a", "--json"], ["checkpoints", "show", "s/a/step-3", "--json"],
        ["checkpoints", "diff", "s/a/step-3", "s/b/step-3", "--json"], ["checkpoints", "verify", "s/a", "--json"],
    ]  # fmt: skip


Respond = Callable[[str, str, bytes], tuple[int, bytes]]
"""The status and body of an answer to method, path and body; status 0 hangs up."""


@contextmanager
def answering(respond: Respond) -> Iterator[str]:
    """Serves HTTP on loopback; yields the URL."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, data = respond(
                self.command, self.path, self.rfile.read(int(self.headers.get("Content-Length") or 0))
            )
            self.close_connection = True
            if status:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else data)

        do_POST = do_PUT = do_DELETE = do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = Thread(target=served.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_address[1]}"
    finally:
        served.shutdown()
        served.server_close()
        thread.join()


def server(body: bytes, status: int = 200, paths: Sequence[tuple[str, bytes]] = ()) -> AbstractContextManager[str]:
    """Answers requests with these bytes, or with those of the first path prefix; yields the URL."""
    return answering(
        lambda _, path, __: next(((200, data) for begin, data in paths if path.startswith(begin)), (status, body))
    )


def _joined(*names: str) -> str:
    return MARK + "".join(TEXTS[name].removeprefix(MARK) for name in names)


GROUPS = {
    "controls": _joined("title", "clear", "colour", "link", "c1", "bells", "bidi", "invisible"),
    "lines": _joined("return", "lines", "tab"),
    "markup": _joined("markup", "broken markup", "html", "format"),
    "wide": _joined("wide", "combining"),
    "long": TEXTS["long"],
    "shell": TEXTS["shell"],
}
"""The same texts in fewer runs of the commands."""
