"""Reads a Hugging Face model from a directory or S3: config.json, and safetensors by byte ranges.

Only safetensors are accepted: a pickle can run arbitrary code when it is loaded.
"""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from raypp.errors import CheckpointError, JobError, Problem, RayppError
from raypp.job.family import Shape
from raypp.job.models import DecoderOptions
from raypp.job.paths import is_hub_name
from raypp.state.checkpoint.arrays import Array, as_float64, convert, numpy_dtype
from raypp.state.hf.names import hf_parts
from raypp.state.hf.tensor import (
    FP8_BLOCK,
    Fp8Tensor,
    GrownTensor,
    HfTensor,
    Mxfp4Tensor,
    dequantised,
    fp8_values,
    stored_names,
    with_dequantised,
)
from raypp.state.hf.text_config import text_config
from raypp.storage import NotFound, ObjectInfo, ObjectStore, open_store
from raypp.storage.store import check_key
from raypp.untrusted.documents import Bounds, parse_as, parse_object
from raypp.untrusted.safetensors_header import LENGTH_BYTES, MOST_BYTES, header_length, parse_header

KEY = "model.from_hf"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CONFIG = "config.json"
GENERATION = "generation_config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_READERS = 8
_SUMMED_BYTES = 16 << 20
_BASE = ("layers.", "embed_tokens.", "norm.", "embed_tokens_per_layer.", "per_layer_")
"""How names begin in files of a base model, which is saved without its head."""
_OF_TEXT = ("model.language_model.", "language_model.model.", "language_model.")
"""How the names of the text's tensors begin in files of a multimodal model; the last has a head."""
_FIX = "download the model again"
_CONFIG_BOUNDS = Bounds(size=4 << 20)
_CONFIG_DEPTH = 16
_INDEX_BOUNDS = Bounds(size=64 << 20)
_SHOWN = 300
_MOST_FILES = 100_000
_MOST_TENSORS = 300_000
_SHOWN_PROBLEMS = 8
_SAMPLES, _SAMPLE_BYTES = 4, 16 << 10


class _Index(TypedDict):
    """The index of a model in several files: each tensor's file."""

    weight_map: dict[str, str]


class HfFiles:
    """The files of a model. `url`: a directory or `s3://bucket/prefix`, else JobError is raised."""

    def __init__(self, url: str) -> None:
        try:
            self.store: ObjectStore = open_store(url)
        except JobError as error:
            raise JobError(Problem(KEY, error.problems[0].fault, error.problems[0].fix)) from error
        self._named, self.bytes_read = url, 0
        """Bytes of tensors read so far."""
        self._means: dict[str, bytes] = {}
        self._averaging = Lock()

    def place(self, key: str) -> str:
        """Returns the location of a file, for messages."""
        return f"{self.store.url}/{key}"

    def config(self) -> dict[str, Any]:
        """Returns the content of config.json. Raises JobError: it is missing, or no JSON object."""
        place = self.place(_CONFIG)
        try:
            text = self._whole(_CONFIG, _CONFIG_BOUNDS.size, JobError)
        except NotFound:
            fix = "name a directory, or the URL of one in a store, with config.json and safetensors files"
            if is_hub_name(self._named):
                fix = (
                    f"run `hf download {self._named} --local-dir DIR` where there is a network (with HF_TOKEN, if the "
                )
                fix += "model is gated), copy DIR to where every node can read it, or to a store, and name that"
            raise JobError(Problem(KEY, f"there is no {place}", fix)) from None
        config = parse_object(text, place, _CONFIG_BOUNDS, JobError, _FIX)
        if _depth(config) > _CONFIG_DEPTH:
            raise JobError(Problem(KEY, f"{place} is nested more than {_CONFIG_DEPTH} levels deep", _FIX))
        return config

    def generation_config(self) -> dict[str, Any] | None:
        """Returns the content of generation_config.json; None if there is no JSON object. Raises
        JobError: it is not JSON, or is too large."""
        try:
            text = self._whole(GENERATION, _CONFIG_BOUNDS.size, JobError)
        except NotFound:
            return None
        config = parse_as(Any, text, self.place(GENERATION), _CONFIG_BOUNDS, JobError, _FIX)
        return config if isinstance(config, dict) else None

    def listed(self) -> list[ObjectInfo]:
        """Returns the files of the model's folder, without those in folders below. Raises
        CheckpointError: there are too many to be a model."""
        infos = list(islice(self.store.list(), _MOST_FILES + 1))
        if len(infos) > _MOST_FILES:
            fault = f"has more than {_MOST_FILES:,} files"
            raise CheckpointError(Problem(self.store.url, fault, "name a model's folder"))
        return [info for info in infos if "/" not in info.key]

    def tensors(self, wanted: Iterable[str] | None = None) -> dict[str, HfTensor]:
        """Reads the headers of the files that hold the wanted tensors (None: of all files). Returns
        tensors by name, including others in the same files; missing tensors are left out. Names
        have the prefix `model.`, which files of a base model lack, and those of a multimodal
        model's text are as of a model of text. Two tensors that are one in MXFP4 or FP8
        (`hf.tensor`) are here as that one, in bf16. Raises CheckpointError: There are no
        safetensors, or a file is missing, torn or invalid."""
        where = self._weight_map()
        if isinstance(where, dict):
            names = where if wanted is None else [part for name in wanted for part in stored_names(name, where)]
            keys = sorted({where[name] for name in names})
        else:
            keys = where
        named: dict[str, HfTensor] = {}
        with ThreadPoolExecutor(_READERS) as pool:
            spans = list(pool.map(self._span, keys))
            if (total := sum(length for length, _ in spans)) > MOST_BYTES:
                fault = f"the headers of its files have {total:,} bytes together; at most {MOST_BYTES:,} are read"
                raise CheckpointError(Problem(self.store.url, fault, _FIX))
            texts = pool.map(lambda key, span: self._get(key, LENGTH_BYTES, LENGTH_BYTES + span[0]), keys, spans)
            for key, (length, data_bytes), text in zip(keys, spans, texts, strict=True):
                header = parse_header(text, data_bytes, self.place(key), fix=_FIX)
                data = LENGTH_BYTES + length
                for name, tensor in header.tensors.items():
                    named[_full(name)] = HfTensor(name, tensor.dtype, tensor.shape, key, data + tensor.begin)
                if len(named) > _MOST_TENSORS:
                    raise CheckpointError(Problem(self.store.url, f"has more than {_MOST_TENSORS:,} tensors", _FIX))
        return with_dequantised(named, self.store.url, _FIX)

    def read(self, tensor: HfTensor, first: int, last: int) -> bytes:
        """Reads the rows `[first, last)`. Raises CheckpointError: the file is missing or torn."""
        if isinstance(tensor, Mxfp4Tensor):
            return dequantised(*(self.rows(part, first, last) for part in (tensor.blocks, tensor.scales))).tobytes()
        if isinstance(tensor, Fp8Tensor):
            above, below = first // FP8_BLOCK, -(-last // FP8_BLOCK)
            scales = convert(self.rows(tensor.scales, above, below), tensor.scales.dtype, "F32")
            return fp8_values(self.rows(tensor.codes, first, last), scales, first % FP8_BLOCK).tobytes()
        if isinstance(tensor, GrownTensor) and last > tensor.stored:
            stored = self.read(tensor, first, tensor.stored) if first < tensor.stored else b""
            return stored + self._mean(tensor) * (last - max(first, tensor.stored))
        begin, end = tensor.begin + first * tensor.row_bytes, tensor.begin + last * tensor.row_bytes
        data = self._get(tensor.key, begin, end)
        self.bytes_read += len(data)
        return data

    def rows(self, tensor: HfTensor, first: int, last: int) -> Array:
        """Reads the rows `[first, last)` as an array `[last - first, *shape[1:]]`."""
        values = np.frombuffer(self.read(tensor, first, last), numpy_dtype(tensor.dtype))
        return values.reshape((last - first, *tensor.shape[1:]) if tensor.shape else ())

    def _mean(self, tensor: GrownTensor) -> bytes:
        """Returns the mean of a tensor's rows in the file, in its dtype. The rows are added one
        after another in fp64, so the mean has the same bits on every rank."""
        with self._averaging:
            if tensor.name not in self._means:
                total: Any = np.zeros(tensor.shape[1:])
                step = max(1, _SUMMED_BYTES // tensor.row_bytes)
                for first in range(0, tensor.stored, step):
                    rows = self.rows(tensor, first, min(first + step, tensor.stored))
                    total = total + np.add.reduce(as_float64(rows, tensor.dtype), axis=0)
                self._means[tensor.name] = convert(total / tensor.stored, "F64", tensor.dtype).tobytes()
            return self._means[tensor.name]

    def _weight_map(self) -> dict[str, str] | list[str]:
        """Returns each tensor's file if there is an index, else the files' names."""
        if self.store.head(_SINGLE) is not None:  # before an index, which may be of an earlier save
            return [_SINGLE]
        place = self.place(_INDEX)
        try:
            text = self._whole(_INDEX, _INDEX_BOUNDS.size, CheckpointError)
        except NotFound:
            pass
        else:
            where = parse_as(_Index, text, place, _INDEX_BOUNDS, fix=_FIX, unknown="ignore")["weight_map"]
            for key in set(where.values()):
                try:
                    check_key(key)
                except JobError as error:
                    raise CheckpointError(Problem(place, error.problems[0].fault[:_SHOWN], _FIX)) from None
            return {_full(name): key for name, key in where.items()}
        here = [info.key for info in self.listed()]
        keys = sorted(key for key in here if key.endswith(".safetensors"))
        if keys:
            return keys
        pickled = sorted(key for key in here if key.endswith((".bin", ".pt", ".pth", ".ckpt")))
        fault, fix = "there are no safetensors", "name a model that save_pretrained wrote and that every node can read"
        if pickled:
            fault += f", only {pickled[0]}: raypp loads no pickle"
            fix = "convert the model: load it with transformers, then save_pretrained(…, safe_serialization=True)"
        raise CheckpointError(Problem(self.store.url, fault, fix))

    def _span(self, key: str) -> tuple[int, int]:
        """Returns the bytes of a file's header and those after it. Raises as `tensors`."""
        info = self.store.head(key)
        if info is None:
            raise self._missing(key)
        length = header_length(self._get(key, 0, LENGTH_BYTES), info.size, self.place(key), fix=_FIX)
        return length, info.size - LENGTH_BYTES - length

    def _whole(self, key: str, most: int, error: type[RayppError]) -> bytes:
        data = self.store.get(key, 0, most + 1)
        if len(data) > most:
            raise error(Problem(self.place(key), f"has more than {most:,} bytes", _FIX))
        return data

    def _missing(self, key: str) -> CheckpointError:
        return CheckpointError(Problem(self.place(key), "is missing", _FIX))

    def _get(self, key: str, begin: int, end: int) -> bytes:
        try:
            data = self.store.get(key, begin, end)
        except NotFound:
            raise self._missing(key) from None
        if len(data) != end - begin:
            raise CheckpointError(Problem(self.place(key), f"is torn: it ends before byte {end}"))
        return data


def _full(name: str) -> str:
    """Returns the name that a tensor has in the whole model of text."""
    inner = name.removeprefix(next(filter(name.startswith, _OF_TEXT), ""))
    if inner.startswith(_BASE):
        return f"model.{inner}"
    return inner if inner.startswith("lm_head.") else name


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def matching_tensors(files: HfFiles, wanted: Mapping[str, Shape]) -> dict[str, HfTensor]:
    """Returns the file tensors that make up the given global tensors, by their name in the files.
    Raises CheckpointError: tensors are missing or have other shapes; names them."""
    parts = list(islice((part for name, shape in wanted.items() for part in hf_parts(name, shape)), _MOST_TENSORS + 1))
    if len(parts) > _MOST_TENSORS:
        fault = f"has more than {_MOST_TENSORS:,} tensors, with one for each expert of a layer"
        raise CheckpointError(Problem(files.store.url, fault, "check the sizes of the model"))
    there = files.tensors(part.name for part in parts)
    problems = []
    for part in parts:
        tensor = there.get(part.name)
        if tensor is None:
            fix = "check that all files, config.json included, are of one model"
            if part.name == HEAD:
                fix = "use files that hold the head, too: a base model (AutoModel) is saved without it"
            problems.append(Problem(part.name, f"is not in {files.store.url}", fix))
        elif _may_grow(files, part.name, tensor.shape, part.shape):
            stored = tensor.shape[0]
            there[part.name] = GrownTensor(tensor.name, tensor.dtype, part.shape, tensor.key, tensor.begin, stored)
        elif tensor.shape != part.shape:
            fault = (
                f"has shape {list(tensor.shape)} in {files.place(tensor.key)}, the job's model needs {list(part.shape)}"
            )
            problems.append(Problem(part.name, fault, "check that all files, config.json included, are of one model"))
    if problems:
        if (left := len(problems) - _SHOWN_PROBLEMS) > 0:
            problems[_SHOWN_PROBLEMS:] = [Problem("", f"and {left} more tensors")]
        raise CheckpointError(problems)
    return {part.name: there[part.name] for part in parts}


def _may_grow(files: HfFiles, name: str, stored: Shape, wanted: Shape) -> bool:
    """Whether an embedding or a head has the rows of config.json, and the job's model has more."""
    if name not in (EMBEDDING, HEAD) or len(stored) != len(wanted) or stored[1:] != wanted[1:]:
        return False
    return stored[0] < wanted[0] and stored[0] == text_config(files.config()).get("vocab_size")


def base_identity(files: HfFiles) -> str | None:
    """Returns the identity of a model's weights, the same wherever its files lie. It depends on
    sizes, beginnings and samples (some hundred KB) of the safetensors files, not on names. Sizes
    and headers would not do: a base and its fine-tune have the same. It has 16 hexadecimal digits;
    None if there are no safetensors. Raises StoreError: the store does not answer."""
    here = [info for info in files.listed() if info.key.endswith(".safetensors")]

    def sampled(key: str, size: int) -> bytes:
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        for index in range(_SAMPLES + 1):
            begin = index * max(0, size - _SAMPLE_BYTES) // _SAMPLES
            digest.update(files.store.get(key, begin, min(begin + _SAMPLE_BYTES, size)))
        return digest.digest()

    with ThreadPoolExecutor(_READERS) as pool:
        samples = sorted(pool.map(lambda info: sampled(info.key, info.size), here))
    return hashlib.sha256(b"".join(samples)).hexdigest()[:16] if samples else None


def with_base_id(options: DecoderOptions, files: HfFiles) -> DecoderOptions:
    """Returns the `model:` section with `lora.base_id` set; unchanged without `model.lora`. Raises
    JobError: `lora.base_id` is set, and the files are those of another model."""
    if options.lora is None:
        return options
    own, known = base_identity(files), options.lora.base_id
    if known is not None and own is not None and own != known:
        fault = f"{files.store.url} holds other weights ({own}) than those the adapters belong to ({known})"
        raise JobError(Problem(KEY, fault, "name the model that the run began with, or start a new run"))
    return options.model_copy(update={"lora": options.lora.model_copy(update={"base_id": own or known})})
