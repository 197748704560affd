"""Files that a stranger or a fault may leave where raypp reads one, and what reads them.

A case writes files below a folder and reads them, as a command does. It ends, or raises a
`RayppError`.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from raypp.errors import RayppError
from raypp.job.checks import check_spec
from raypp.job.job import Job
from raypp.job.models import DecoderOptions
from raypp.job.paths import resolve_paths
from raypp.rank.data.sources import check_data, open_documents, source_request
from raypp.rank.data.tokenizer import FileTokenizer
from raypp.rank.data.write_shards import Options, write_shards
from raypp.state.hf.config import options_from_config
from raypp.state.hf.model_files import HfFiles, base_identity, matching_tensors
from raypp.state.hf.names import model_tensors
from raypp.storage import open_store
from raypp.tools.export.tokenizer_files import tokenizer_files

Case = Callable[[Path], object]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4, "intermediate_size": 4,
    "model_type": "llama", "num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "vocab_size": 8, "max_position_embeddings": 64,
}  # fmt: skip
MOE = {
    **CONFIG, "model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TOKENIZER: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "added_tokens": [
        {"id": 2, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
    ],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}  # fmt: skip

ODD: list[Any] = [
    None, True, -1, 0, 0.5, 1e308, -0.0, 10**9, 10**18, 10**400, float("nan"), float("inf"), "", "8", "\x1b]0;t\x07",
    "x" * 100_000, [], [0], [[]], ["a", 1], [None] * 1000, [10**400], {}, {"a": {}}, {"rope_type": []},
]  # fmt: skip
"""Values of every type and of odd sizes."""


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


DOCUMENTS: dict[str, bytes] = {
    "empty": b"", "a null": b"null", "a number": b"3", "a text": b'"text"', "a list": b"[]", "an object": b"{}",
    "no UTF-8": b"\xff\xfe{}", "NUL": b"\0" * 1000, "cut off": b'{"a": [1,', "NaN": b"NaN", "deep": nested(100_000),
    "deep enough to parse": nested(900), "deep lists": b"[" * 100_000, "many digits": b'{"a": ' + b"1" * 5000 + b"}",
    "twice": b'{"a": 1, "a": 2}', "many values": b"[" + b"[]," * 2_000_000 + b"[]]", "surrogate": b'{"\\ud800": 1}',
    "a pickle": b"\x80\x04\x95", "spaces": b" " * 20_000_000,
}  # fmt: skip
"""Contents that are no document of any kind, or hardly one."""


def special_files(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields ways to put something at a path that is no readable regular file."""
    yield "a FIFO", lambda: os.mkfifo(path)
    yield "/dev/zero", lambda: path.symlink_to("/dev/zero")
    yield "a folder", lambda: path.mkdir()
    yield "a link to itself", lambda: path.symlink_to(path)
    yield "a link to nothing", lambda: path.symlink_to(path.parent / "nothing")
    yield "a socket", lambda: _listen(path)


def _listen(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def header(tensors: Any, data: int = 0) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def model_file(options: DecoderOptions) -> bytes:
    """Returns a safetensors file with the tensors of a model, all zero."""
    document, end = {}, 0
    for name, shape in model_tensors(options).items():
        size = 4 * int(np.prod(shape))
        document[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return header({**document, "__metadata__": {"format": "pt"}}, end)


LLAMA = DecoderOptions(kind="llama", num_layers=1, hidden_size=4, num_heads=2, num_kv_heads=1, ffn_size=4, vocab_size=8)


def use_model(folder: Path) -> None:
    """Does what plan, submit and import do with a model's folder."""
    url = str(folder)
    files = HfFiles(url)
    options = options_from_config(files.config(), DecoderOptions(from_hf=url), files.place("config.json"))
    there = matching_tensors(files, model_tensors(options))
    for tensor in list(there.values())[:3]:
        files.read(tensor, 0, 1)
    base_identity(files)


def job(**data: Any) -> Job:
    return Job.model_validate({"name": "hostile", "model": {"vocab_size": 320}, "data": data})


def use_data(kind: str, path: str, **more: Any) -> None:
    """Does what plan, preflight and a rank do with a job's data. Raises what they find."""
    asked = resolve_paths(job(kind=kind, path=path, seq_len=16, **more), Path("/"))
    problems = [*check_spec(asked), *check_data(asked)]
    if problems:
        raise RayppError(problems)
    open_documents(asked)


def use_tokenizer(path: Path) -> None:
    """Does what plan and a rank do with a tokenizer."""
    problems = check_spec(job(kind="text", path=__file__, tokenizer=str(path)))
    FileTokenizer(path)
    if problems:
        raise RayppError(problems)


def export_tokenizer_beside(path: Path) -> None:
    """Does what an export does with the files beside a tokenizer."""
    (path.parent / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    tokens = {"data": {"tokenizer": str(path.parent / "tokenizer.json"), "seq_len": 16}}
    tokenizer_files(tokens, None, DecoderOptions(vocab_size=320))


def _model_with(name: str, content: bytes | Callable[[], bytes]) -> Case:
    """A case of a model of which a file is changed; a large content is made when it runs."""

    def case(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "model.safetensors").write_bytes(model_file(LLAMA))
        (folder / name).write_bytes(content() if callable(content) else content)
        use_model(folder)

    return case


def _config_with(base: dict[str, Any], **changed: Any) -> Case:
    def case(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**base, **changed}))
        use_model(folder)

    return case


def model_cases() -> Iterator[tuple[str, Case]]:
    for name in ("config.json", "model.safetensors.index.json", "model.safetensors"):
        for what, content in DOCUMENTS.items():
            yield f"{name}: {what}", _model_with(name, content)
        yield from _special(name, "model", use_model)
    for what, content in DOCUMENTS.items():
        yield f"header: {what}", _model_with("model.safetensors", header(content))
        yield f"tensors: {what}", _model_with("model.safetensors", header(b'{"w":' + content + b"}"))
    bases = {"llama": CONFIG, "qwen3_moe": MOE}
    kinds = ("gemma2", "gemma3_text", "smollm3", "phi3", "glm", "stablelm")
    bases |= {kind: {**CONFIG, "model_type": kind} for kind in kinds}
    bases |= {"qwen2 with windows": {**CONFIG, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}}
    bases |= {"gpt_oss": {**MOE, "model_type": "gpt_oss", "num_local_experts": 2}}
    more = ("layer_types", "rope_scaling", "rope_parameters", "quantization_config", "partial_rotary_factor")
    more += (
        "no_rope_layers", "no_rope_layer_interval", "sliding_window_pattern", "sliding_window", "max_window_layers",
    )  # fmt: skip
    more += ("head_dim", "original_max_position_embeddings", "mlp_only_layers", "rope_local_base_freq")
    for kind, base in bases.items():
        for key in dict.fromkeys((*base, *more)):
            for number, value in enumerate(ODD):
                yield f"{kind} {key} {number}", _config_with(base, **{key: value})
    for key in (*ROPE, "mscale", "attention_factor", "beta_fast", "truncate", "short_factor", "type", "\x1b[2J"):
        for number, value in enumerate(ODD):
            scaled = {**ROPE, "mscale_all_dim": 1.0, "mscale": 1.0, key: value}
            yield f"rope {key} {number}", _config_with(CONFIG, rope_scaling=scaled)
    yield "rope tables", _config_with(CONFIG, rope_scaling={"rope_type": "longrope", "short_factor": [1.0] * 200_000})
    yield "10^9 layers", _config_with(MOE, num_hidden_layers=10**9)
    yield "10^9 layers with windows", _config_with(bases["gemma2"], num_hidden_layers=10**9)
    yield "10^9 experts", _config_with(MOE, num_experts=10**9)
    yield "10^5 layers with 10^5 experts", _config_with(MOE, num_experts=10**5, num_hidden_layers=10**5)
    yield (
        "many layers without experts",
        _config_with(MOE, num_hidden_layers=4096, mlp_only_layers=list(range(4096, 8192))[:4096]),
    )
    yield from _weight_cases()


def _weight_cases() -> Iterator[tuple[str, Case]]:
    good = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    for key in good:
        for number, value in enumerate(ODD):
            yield f"tensor {key} {number}", _model_with("model.safetensors", header({"w": {**good, key: value}}, 16))
    for number, value in enumerate(ODD):
        yield f"metadata {number}", _model_with("model.safetensors", header({"__metadata__": value, "w": good}, 16))
        index = json.dumps({"weight_map": {"model.norm.weight": value}}).encode()
        yield f"index {number}", _model_with("model.safetensors.index.json", index)
        index = json.dumps({"weight_map": value}).encode()
        yield f"weight_map {number}", _model_with("model.safetensors.index.json", index)
    for length in (1, 10**6, 10**10, 10**18, 2**64 - 1):
        file = length.to_bytes(8, "little") + b"{}"
        yield f"a header of {length} bytes", _model_with("model.safetensors", file)
    far = {**good, "data_offsets": [10**18, 10**18 + 16]}
    yield "a tensor past the end", _model_with("model.safetensors", header({"w": far}, 16))
    yield "overlapping tensors", _model_with("model.safetensors", header({"v": good, "w": good}, 16))
    for shape in ([10**9, 10**9, 0, 16], [1, 1, 1, 16], [16], []):
        blocks = {"dtype": "U8", "shape": shape, "data_offsets": [0, prod(shape)]}
        scales = {"dtype": "U8", "shape": [1, 1, 1], "data_offsets": [prod(shape), prod(shape) + 1]}
        pair = {"model.norm.weight_blocks": blocks, "model.norm.weight_scales": scales}
        yield f"MXFP4 of {shape}", _model_with("model.safetensors", header(pair, prod(shape) + 1))
    large = {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4 * 10**18]}
    yield "a tensor of 4 EB", _model_with("model.safetensors", header({"model.norm.weight": large}, 16))
    yield "a million tensors", _model_with("model.safetensors", _header_of_a_million)
    yield "an index of a million tensors", _model_with("model.safetensors.index.json", _index_of_a_million)
    for key in ("../../etc/passwd", "/etc/passwd", "a/../../b", "", ".", "\0", "a\\b", "\x1b[2J", "x" * 5000, "none"):
        index = json.dumps({"weight_map": dict.fromkeys(model_tensors(LLAMA), key)}).encode()
        yield f"an index that names {key[:20]!r}", _model_with("model.safetensors.index.json", index)


def _header_of_a_million() -> bytes:
    many = b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % number for number in range(1_000_000))
    return header(b"{" + many + b"}")


def _index_of_a_million() -> bytes:
    where = b",".join(b'"%d":"model.safetensors"' % number for number in range(1_000_000))
    return b'{"weight_map":{' + where + b"}}"


def _special(name: str, what: str, use: Callable[[Path], object]) -> Iterator[tuple[str, Case]]:
    for number, (kind, _) in enumerate(special_files(Path("x"))):

        def case(folder: Path, number: int = number) -> None:
            if what == "model":
                (folder / "config.json").write_text(json.dumps(CONFIG))
                (folder / name).unlink(missing_ok=True)
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            list(special_files(place))[number][1]()
            use(folder if what == "model" else place)

        yield f"{name} ({what}): {kind}", case


def _file_with(name: str, content: bytes, use: Callable[[Path], object]) -> Case:
    def case(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        use(path)

    return case


def document_cases() -> Iterator[tuple[str, Case]]:
    kinds: list[tuple[str, dict[str, Any], Callable[[Path], object]]] = [
        ("tokenizer.json", TOKENIZER, use_tokenizer),
        ("generation_config.json", {"eos_token_id": 3, "top_p": 0.9}, export_tokenizer_beside),
    ]
    for name, good, use in kinds:
        yield f"{name} as it should be", _file_with(name, json.dumps(good).encode(), use)
        for what, content in DOCUMENTS.items():
            yield f"{name}: {what}", _file_with(name, content, use)
        yield from _special(name, "file", use)
        for key in good:
            for number, value in enumerate(ODD):
                yield f"{name}: {key} {number}", _file_with(name, json.dumps({**good, key: value}).encode(), use)
                inner = good[key][0] if isinstance(good[key], list) else good[key]
                for deeper in inner if isinstance(inner, dict) else ():
                    changed = {**inner, deeper: value}
                    document = {**good, key: [changed] if isinstance(good[key], list) else changed}
                    yield (f"{name}: {key}.{deeper} {number}", _file_with(name, json.dumps(document).encode(), use))


def data_cases() -> Iterator[tuple[str, Case]]:
    for kind, name in (("text", "a.txt"), ("jsonl", "a.jsonl"), ("tokens", "a.npy")):

        def use(path: Path, kind: str = kind) -> None:
            use_data(kind, str(path))

        for what, content in DOCUMENTS.items():
            yield f"{kind}: {what}", _file_with(name, content, use)
        yield from _special(name, kind, use)
    for number, value in enumerate(ODD):
        line = json.dumps({"text": value}).encode()
        yield f"a text {number}", _file_with("a.jsonl", line, lambda path: use_data("jsonl", str(path)))
    yield (
        "a line of many lists",
        _file_with(
            "a.jsonl", b'{"text": "a", "b": [' + b"[]," * 5_000_000 + b"[]]}", lambda path: use_data("jsonl", str(path))
        ),
    )
    magic = b"\x93NUMPY\x01\x00"
    for number, text in enumerate(
        [
            "", "(", "{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000000,), }", "[" * 60_000,
            "{'descr': '|O', 'fortran_order': False, 'shape': (2,), }", "{'descr': '<i8', 'shape': (-5,)}",
            "{'descr': '<i8', 'fortran_order': False, 'shape': (-5,), }", "{'descr': 3, 'shape': 3}",
            "{'descr': '<i8', 'fortran_order': False, 'shape': (2, 2), }", "'" * 70, "1" * 6000,
            "{'descr': '<i8', 'fortran_order': False, 'shape': (%s,), }" % ("9" * 5000),
            "{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (1,), }",
            "{'descr': '<V0', 'fortran_order': False, 'shape': (1,), }", "().__class__",
        ]
    ):  # fmt: skip
        array = magic + len(text).to_bytes(2, "little") + text.encode() + bytes(64)
        yield f"a header of an array {number}", _file_with("a.npy", array, lambda path: use_data("tokens", str(path)))
    wide = b"\x93NUMPY\x02\x00" + (2**32 - 1).to_bytes(4, "little") + bytes(1000)
    yield "a header of 4 GB", _file_with("a.npy", wide, lambda path: use_data("tokens", str(path)))
    yield "a zip", _file_with("a.npy", b"PK\x03\x04" + bytes(100), lambda path: use_data("tokens", str(path)))
    for kind, magic in (("parquet", b"PAR1"), ("arrow", b"ARROW1\0\0"), ("arrow", b"\xff\xff\xff\xff")):
        for number, middle in enumerate((b"", bytes(100), b"\xff" * 100, b"\xff\xff\xff\x7f" * 20, b"\x15\x04" * 500)):
            name = f"{magic!r} of {kind}, {len(magic)} bytes, case {number}"
            yield name, _file_with(f"a.{kind}", magic + middle + magic, lambda path: use_data("hf", str(path)))
    yield "a dataset that is a FIFO", lambda folder: (os.mkfifo(folder / "a.parquet"), use_data("hf", f"{folder}/*"))
    for number, content in enumerate(DOCUMENTS.values()):
        yield f"a manifest of shards {number}", _shards_with("tokens.json", content)
    for number, content in enumerate((b"", b"\xff" * 4096)):
        yield f"an index of shards {number}", _shards_with("shard-000000.index", content)
        yield f"ids of shards {number}", _shards_with("shard-000000.ids", content)
        yield f"loss masks of shards {number}", _shards_with("shard-000000.loss", content)
    yield "a glob over loops", _loops
    yield "a glob over all files", lambda _: use_data("text", "/**/*.no-such-ending")
    yield "a folder of loops", lambda folder: (_loop_links(folder), use_data("text", str(folder)))
    yield "a folder of special files", _specials


def _shards_with(name: str, content: bytes) -> Case:
    """Returns a case that reads token shards of which one file has another content."""

    def case(folder: Path) -> None:
        (folder / "a.jsonl").write_text('{"prompt": "one", "completion": "two"}')
        read, request = source_request(job(kind="chat", path=f"{folder}/a.jsonl"))
        write_shards(read, request, open_store(f"{folder}/out"), Options(1))
        (folder / "out" / name).write_bytes(content)
        use_data("tokens", f"{folder}/out")
        train = open_documents(job(kind="tokens", path=f"{folder}/out")).train
        train.ids(0), train.carries_loss(0)

    return case


def _loop_links(folder: Path) -> None:
    for name in ("a", "b", "c"):
        (folder / name).mkdir()
        for other in ("a", "b", "c"):
            (folder / name / f"to-{other}").symlink_to(folder / other)
        (folder / name / "up").symlink_to(folder)


def _loops(folder: Path) -> None:
    _loop_links(folder)
    use_data("text", f"{folder}/**/*.txt")


def _specials(folder: Path) -> None:
    os.mkfifo(folder / "a.txt")
    (folder / "b.txt").symlink_to("/dev/zero")
    (folder / "c.txt").mkdir()
    use_data("text", str(folder))


@cache
def all_cases() -> dict[str, Case]:
    return {name: case for cases in (model_cases, document_cases, data_cases) for name, case in cases()}
