"""Files that are not a run's: those of Hugging Face models, data, measurements and local state."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sys
import tempfile
from pathlib import Path

import zstandard

from tests.fuzz import target

sys.path.append(str(Path(__file__).parents[1] / "unit" / "hostile"))

from file_cases import (
    CONFIG,
    LINKS,
    LLAMA,
    PLACE,
    ROPE,
    STATE,
    TOKENIZER,
    costs_document,
    job,
    model_file,
    use_data,
    use_model,
    use_tokenizer,
)

from raypp.clusters import local
from raypp.clusters.known_runs import known_runs
from raypp.data.chat_template import ChatTemplate, TemplateFault
from raypp.errors import JobError
from raypp.hf.config import config_from_options, options_from_config
from raypp.hf.names import model_tensors
from raypp.inference.prompts import read_prompts
from raypp.inference.source import find_source
from raypp.planning.costs import read_costs
from raypp.planning.machines import read_machines
from raypp.spec.families import FAMILIES
from raypp.spec.models import DecoderOptions
from raypp.untrusted.documents import parse_object
from raypp.untrusted.safetensors_header import LENGTH_BYTES, header_length, parse_header

_TEMPLATE = Path(__file__).parents[2] / "jobs/data/chatml.jinja"
_CONFIG = json.dumps(CONFIG).encode()
_FILE = model_file(LLAMA)


@target(_FILE)
def safetensors(data: bytes) -> None:
    length = header_length(data, len(data), "file")
    parse_header(data[LENGTH_BYTES : LENGTH_BYTES + length], len(data) - LENGTH_BYTES - length, "file")


@target(b'{"prompt": "In the beginning"}\n\n{"prompt": "a", "id": 3}\n')
def prompts(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_bytes(data)
        read_prompts(file)


@target(b'{"eos_token_id": [5, 7], "temperature": 0.5}', b'{"eos_token_id": 5}')
def generation_config(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(_CONFIG)
        (Path(folder) / "generation_config.json").write_bytes(data)
        find_source(folder)


@target(_FILE)
def weights(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(_CONFIG)
        (Path(folder) / "model.safetensors").write_bytes(data)
        use_model(Path(folder))


@target(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(model_tensors(LLAMA), "model.safetensors")}).encode())
def index(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(_CONFIG)
        (Path(folder) / "model.safetensors").write_bytes(_FILE)
        (Path(folder) / "model.safetensors.index.json").write_bytes(data)
        use_model(Path(folder))


def _configs() -> list[bytes]:
    options = [family.options(kind=family.name, num_layers=2, hidden_size=64) for family in FAMILIES.values()]
    found = [config_from_options(one, dtype="float32", context=64, eos_id=None) for one in options]
    return [json.dumps(one).encode() for one in (*found, {**CONFIG, "rope_scaling": ROPE})]


@target(*_configs())
def config(data: bytes) -> None:
    found = parse_object(data, "config.json", error=JobError)
    options_from_config(found, DecoderOptions(from_hf="there"), "there")


@target(json.dumps(TOKENIZER).encode())
def tokenizer(data: bytes) -> None:
    _with_file("tokenizer.json", data, lambda path: use_tokenizer(path))


@target(json.dumps(LINKS).encode())
def links(data: bytes) -> None:
    _with_file("links.json", data, read_machines)


@target(json.dumps(costs_document()).encode())
def costs(data: bytes) -> None:
    _with_file("costs.json", data, lambda path: read_costs(path, job(kind="synthetic")))


@target(json.dumps(PLACE).encode())
def known_run(data: bytes) -> None:
    _with_file("runs/run.json", data, lambda _: known_runs())


@target(json.dumps(STATE).encode())
def local_state(data: bytes) -> None:
    _with_file("local/state.json", data, lambda _: local.find())


@target(b'{"text": "one"}\n\n{"text": "two", "more": [1, {}]}\n', b'[\n {"text": "[\\"{"},\n {"text": "two"}\n]\n')
def jsonl(data: bytes) -> None:
    _with_file("a.jsonl", data, lambda path: use_data("jsonl", str(path)))


@target(
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": [{}]}\n',
    b'{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}\n',
    b'{"prompt": "a", "completion": "b"}\n',
    b'[{"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]},\n'
    b'{"segments": [{"label": true, "text": "a"}]}]',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "weight": 1, '
    b'"content": "b", "tool_calls": [{"function": {"name": "c", "arguments": "{}"}}]}]}\n',
    b'{"conversations": [{"from": "gpt", "value": "a"}], "system": "s", "tools": "[{}]"}\n',
)
def chat(data: bytes) -> None:
    _with_file("a.jsonl", data, lambda path: use_data("chat", str(path), chat_template=str(_TEMPLATE)))


@target(
    b"{% for m in messages %}{{ m.role ~ m['content']|trim }}{% endfor %}",
    b"{% set n = namespace(x=1) %}{% if tools %}{{ tools|tojson(indent=1) }}{% endif %}{{ n.x * 2 }}",
    b"{% macro f(a) %}{% generation %}{{ a }}{% endgeneration %}{% endmacro %}{{ f('b') }}",
    words=(b"{% for i in range(9) %}", b"{% endfor %}", b"|join", b".replace('a', 'b')", b"[::-1]", b"|map('upper')"),
)
def chat_template(data: bytes) -> None:
    with contextlib.suppress(TemplateFault):
        ChatTemplate(data.decode(errors="replace")).render([{"role": "user", "content": "hello"}])


@target(gzip.compress(b"one\n\ntwo\n", mtime=0))
def gzipped(data: bytes) -> None:
    _with_file("a.txt.gz", data, lambda path: use_data("text", str(path)))


@target(zstandard.ZstdCompressor().compress(b"one\n\ntwo\n"))
def zst(data: bytes) -> None:
    _with_file("a.txt.zst", data, lambda path: use_data("text", str(path)))


@target("A paragraph\nof two lines.\n\nAnd änother.\r\n".encode())
def text(data: bytes) -> None:
    _with_file("a.txt", data, lambda path: use_data("text", str(path)))


@target(
    b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }".ljust(127) + b"\n"
    + b"".join(number.to_bytes(8, "little") for number in (1, 2, 256)),
    words=(b"'descr'", b"'|O'", b"(-1,)", b"'<u8'", b"'>i4'", b"True"),
)  # fmt: skip
def tokens(data: bytes) -> None:
    _with_file("a.npy", data, lambda path: use_data("tokens", str(path)))


def _with_file(name: str, data: bytes, use: object) -> None:
    assert callable(use)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAYPP_HOME"] = folder
        os.environ["RAYPP_CACHE_DIR"] = f"{folder}/cache"
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        use(path)
