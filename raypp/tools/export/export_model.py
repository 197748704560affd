"""Exports a checkpoint as a Hugging Face model: safetensors, config.json, tokenizer. Without torch.
Tensors are copied a few rows at a time, so memory does not grow with the model."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from raypp.errors import CheckpointError, Problem
from raypp.job.known_families import family_of
from raypp.job.models import DecoderOptions
from raypp.state.checkpoint.arrays import FLOATS, convert
from raypp.state.checkpoint.commit import Commit
from raypp.state.checkpoint.saved_tensors import SavedTensors, TensorInfo
from raypp.state.hf.config import config_from_options
from raypp.state.hf.model_files import EMBEDDING
from raypp.state.hf.names import hf_parts, model_tensors, state_names
from raypp.state.hf.original import exported_config, in_layer, model_context, saved_options, trained_length
from raypp.state.hf.tensor import HfTensor
from raypp.state.hf.unused_tensors import Rest
from raypp.storage import ObjectStore
from raypp.tools.export.merged_tensors import MergedTensors
from raypp.tools.export.tokenizer_files import tokenizer_files
from raypp.untrusted.safetensors_header import ELEMENT_BYTES

PIECE_BYTES = 32 << 20
"""Bytes per copied piece; about twice as much is in memory at once."""
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Exported:
    """The result of an export. `tensors`: number of tensors, as transformers counts them."""

    files: tuple[str, ...]
    tensors: int
    size: int
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class _Tensor:
    """One exported tensor: a whole saved tensor, or one index of it (an expert). Or one beside the
    text, if its source is of the files that the run began with."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: TensorInfo | HfTensor
    expert: int | None = None

    @property
    def bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype] * prod(self.shape)


def export_hf(
    store: ObjectStore,
    commit: Commit,
    target: ObjectStore,
    *,
    dtype: str | None = None,
    shard_bytes: int = 5 << 30,
    job: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    progress: Callable[[int], None] = lambda _bytes: None,
) -> Exported:
    """Writes a checkpoint's model in the format of transformers' `from_pretrained`.

    Adapters are merged with the frozen weights. What a multimodal model has beside its text is put
    back as it was, except that FP8 becomes bf16. config.json is written last: a directory that has
    it is complete. `dtype`: safetensors' name of the dtype of all trained tensors; None: as saved,
    and merged weights as the frozen ones. Parameters that are trained in fp32 beside narrower ones
    are in fp32 if they are in the files that the run began with. `shard_bytes`: maximum bytes of
    tensors in one file. `job`: the run's resolved job, for its tokenizer; None: the commit's.
    `tokenizer`: another one: `bytes`, or the path of a tokenizer.json. `progress`: gets the bytes
    written since its last.

    Raises:
        JobError: The model's family has no Hugging Face format, or frozen weights are not there; or
            the other tokenizer does not fit the model.
        DataError: The other tokenizer is missing or invalid.
        CheckpointError: An object is missing, torn or corrupt, or the checkpoint lacks a tensor.
        StoreError: One of the stores failed.
    """
    options = saved_options(store, commit)
    document = dict(job or commit.job)
    context = model_context(options, trained_length(document))
    texts = tokenizer_files(document, tokenizer, options)
    adapters = SavedTensors(store, commit)
    saved: SavedTensors | MergedTensors = adapters
    merged: list[str] = []
    if options.lora is not None:
        saved = MergedTensors(adapters, options)
        dtype, merged = dtype or saved.dtype, saved.remarks
    rest = Rest(options) if options.original is not None and options.original.rest is not None else None
    tensors = _tensors(options, saved, dtype)
    names = {tensor.dtype for tensor in tensors}
    if rest is not None:
        tensors = [replace(tensor, name=rest.names[tensor.name]) for tensor in tensors]
        tensors += [_Tensor(tensor.name, tensor.shape, tensor.dtype, tensor) for tensor in rest.tensors]
    shards = _shards(tensors, shard_bytes)
    files = []
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        key = "model.safetensors"
        if len(shards) > 1:
            key = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = _header(shard)
        size = len(header) + sum(tensor.bytes for tensor in shard)
        target.put_stream(key, _chunks(header, shard, saved, rest, progress), size)
        where |= {tensor.name: key for tensor in shard}
        files.append(key)
    total = sum(tensor.bytes for tensor in tensors)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        files.append(_put_json(target, "model.safetensors.index.json", index))
    beside = {} if rest is None else rest.processor_files()
    for key, content in {**beside, **texts.files}.items():
        target.put(key, content)
        files.append(key)
    config = config_from_options(options, dtype=_TORCH_NAMES[min(names)], context=context, **texts.ids)
    files.append(_put_json(target, "config.json", exported_config(options, config, context)))
    remarks = [*merged, *texts.remarks]
    if rest is not None:
        remarks.append(f"{len(rest.tensors)} tensors beside the text are those of {rest.files.store.url}, unchanged")
    if options.from_hf is not None and options.original is None:
        fault = "the run does not hold the config.json that it began with (it is older than that, or the file too long)"
        remarks.append(f"{fault}: compare context and special ids with {options.from_hf}/config.json")
    return Exported(tuple(files), len(tensors), total, tuple(remarks))


def _tensors(options: DecoderOptions, saved: SavedTensors | MergedTensors, dtype: str | None) -> list[_Tensor]:
    """Returns the tensors that transformers expects, in the model's order. Raises CheckpointError:
    tensors are missing or have other shapes; names all of them."""
    tensors: list[_Tensor] = []
    problems: list[Problem] = []
    state, family, original = state_names(options), family_of(options), options.original
    masters = frozenset() if family is None or original is None else family.fp32_names(options)
    main = dtype or (saved.infos[EMBEDDING].dtype if EMBEDDING in saved.infos else None)
    for name, shape in model_tensors(options).items():
        info = saved.infos.get(name)
        if info is None or info.shape != shape:
            fault = "is not in the checkpoint" if info is None else f"has shape {list(info.shape)}, not {list(shape)}"
            problems.append(Problem(name, fault))
            continue
        kind = dtype if dtype is not None and info.dtype in FLOATS and name not in state else info.dtype
        if name in masters and original is not None:
            kind = "F32" if in_layer(name) in original.fp32 else main or kind
        tensors += [_Tensor(part.name, part.shape, kind, info, part.expert) for part in hf_parts(name, shape)]
    if problems:
        raise CheckpointError(problems)
    return tensors


def _shards(tensors: list[_Tensor], shard_bytes: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    # Widest elements first, so that every tensor is aligned without padding.
    return [sorted(shard, key=lambda tensor: -ELEMENT_BYTES[tensor.dtype]) for shard in shards]


def _header(shard: list[_Tensor]) -> bytes:
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in shard:
        offsets = [begin, begin + tensor.bytes]
        document[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        begin += tensor.bytes
    header = json.dumps(document, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _chunks(
    header: bytes,
    shard: list[_Tensor],
    saved: SavedTensors | MergedTensors,
    rest: Rest | None,
    progress: Callable[[int], None],
) -> Iterator[bytes]:
    yield header
    for tensor in shard:
        source = tensor.source
        if isinstance(source, HfTensor):
            assert rest is not None
            for data in rest.pieces(source, PIECE_BYTES):
                yield data
                progress(len(data))
            continue
        expert = tensor.expert
        for first, last in source.pieces(PIECE_BYTES) if expert is None else [(expert, expert + 1)]:
            data = convert(saved.rows(source.name, first, last), source.dtype, tensor.dtype).tobytes()
            yield data
            progress(len(data))


def _put_json(target: ObjectStore, key: str, document: Any) -> str:
    target.put(key, json.dumps(document, indent=2).encode())
    return key
