"""Files that are not a run's: those of Hugging Face models, data, measurements and local state."""

import contextlib
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import zstandard

from tests.fuzz import target

sys.path.append(str(Path(__file__).parents[1] / "unit" / "hostile"))

from file_cases import CONFIG, LLAMA, ROPE, TOKENIZER, model_file, use_data, use_model, use_tokenizer

from raypp.errors import JobError
from raypp.job.known_families import FAMILIES
from raypp.job.models import DecoderOptions
from raypp.rank.data.chat_template import ChatTemplate, TemplateFault
from raypp.state.hf.config import config_from_options, options_from_config
from raypp.state.hf.names import model_tensors
from raypp.tools.inference.source import find_source
from raypp.untrusted.documents import parse_object
from raypp.untrusted.safetensors_header import LENGTH_BYTES, header_length, parse_header

_TEMPLATE = Path(__file__).parents[2] / "jobs/data/chatml.jinja"
_CONFIG = json.dumps(CONFIG).encode()
_FILE = model_file(LLAMA)


@target(_FILE)
def safetensors(data: bytes) -> None:
    length = header_length(data, len(data), "file")
    parse_header(data[LENGTH_BYTES : LENGTH_BYTES + length], len(data) - LENGTH_BYTES - length, "file")


@target(b'{"eos_token_id": [5, 7], "temperature": 0.5}', b'{"eos_token_id": 5}')
def generation_config(data: bytes) -> None:
    _with_file("generation_config.json", data, lambda path: find_source(str(path.parent)), config=_CONFIG)


@target(_FILE)
def weights(data: bytes) -> None:
    _with_file("model.safetensors", data, lambda path: use_model(path.parent), config=_CONFIG)


@target(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(model_tensors(LLAMA), "model.safetensors")}).encode())
def index(data: bytes) -> None:
    def use(path: Path) -> None:
        (path.parent / "model.safetensors").write_bytes(_FILE)
        use_model(path.parent)

    _with_file("model.safetensors.index.json", data, use, config=_CONFIG)


def _configs() -> list[bytes]:
    options = [family.options(kind=family.name, num_layers=2, hidden_size=64) for family in FAMILIES.values()]
    found = [config_from_options(one, dtype="float32", context=64, eos_id=None) for one in options]
    return [json.dumps(one).encode() for one in (*found, {**CONFIG, "rope_scaling": ROPE})]


@target(*_configs())
def config(data: bytes) -> None:
    found = parse_object(data, "config.json", error=JobError)
    options_from_config(found, DecoderOptions(from_hf="there"), "there")


def _file(name: str, path: str, use: Callable[[Path], object], *samples: bytes, words: Sequence[bytes] = ()) -> None:
    """Makes a target of what reads a file of this path."""
    target(*samples, words=words, name=name)(lambda data: _with_file(path, data, use))


_file("tokenizer", "tokenizer.json", use_tokenizer, json.dumps(TOKENIZER).encode())
_file(
    "jsonl", "a.jsonl", lambda path: use_data("jsonl", str(path)),
    b'{"text": "one"}\n\n{"text": "two", "more": [1, {}]}\n', b'[\n {"text": "[\\"{"},\n {"text": "two"}\n]\n',
)  # fmt: skip
for _name, _ending, _sample in (
    ("gzipped", "txt.gz", gzip.compress(b"one\n\ntwo\n", mtime=0)),
    ("zst", "txt.zst", zstandard.ZstdCompressor().compress(b"one\n\ntwo\n")),
    ("text", "txt", "A paragraph\nof two lines.\n\nAnd änother.\r\n".encode()),
):
    _file(_name, f"a.{_ending}", lambda path: use_data("text", str(path)), _sample)
_file(
    "tokens", "a.npy", lambda path: use_data("tokens", str(path)),
    b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }".ljust(127) + b"\n"
    + b"".join(number.to_bytes(8, "little") for number in (1, 2, 256)),
    words=(b"'descr'", b"'|O'", b"(-1,)", b"'<u8'", b"'>i4'", b"True"),
)  # fmt: skip


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


def _with_file(name: str, data: bytes, use: Callable[[Path], object], config: bytes | None = None) -> None:
    """Uses a file of this content in a folder, beside a config.json if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAYPP_HOME"] = folder
        os.environ["RAYPP_CACHE_DIR"] = f"{folder}/cache"
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if config is not None:
            (path.parent / "config.json").write_bytes(config)
        use(path)
