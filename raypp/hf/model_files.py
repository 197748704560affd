"""Reads a Hugging Face model from a directory or S3: config.json, and safetensors by byte ranges.

Only safetensors are accepted: a pickle can run arbitrary code when it is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from raypp.checkpoint.arrays import Array, numpy_dtype
from raypp.checkpoint.tensor_file import ELEMENT_BYTES
from raypp.errors import CheckpointError, JobError, Problem, in_words
from raypp.hf.config import KEY
from raypp.storage import NotFound, ObjectStore, open_store

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEADER_LIMIT = 100 << 20
_READERS = 8


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a safetensors file.

    Attributes:
        name: Its name in the file.
        dtype: safetensors' name of its dtype.
        shape: Its shape.
        key: The file's key.
        begin: Offset of its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    key: str
    begin: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dim 0; a tensor without dims is one row."""
        return prod(self.shape[1:]) * ELEMENT_BYTES[self.dtype]


class HfFiles:
    """The files of one model.

    Args:
        url: A directory, or `s3://bucket/prefix`.

    Raises:
        JobError: The URL names no store.
    """

    def __init__(self, url: str) -> None:
        try:
            self.store: ObjectStore = open_store(url)
        except JobError as error:
            raise JobError(Problem(KEY, error.problems[0].what, error.problems[0].fix)) from error
        self.bytes_read = 0
        """Bytes of tensors read so far."""

    def place(self, key: str) -> str:
        """Returns the location of a file, for messages."""
        return f"{self.store.url}/{key}"

    def config(self) -> dict[str, Any]:
        """Returns the content of config.json.

        Raises:
            JobError: It is missing, or is not a JSON object.
        """
        try:
            config = json.loads(self.store.get(_CONFIG))
        except NotFound:
            fix = "name a directory or an S3 URL that contains config.json and safetensors files"
            raise JobError(Problem(KEY, f"there is no {self.place(_CONFIG)}", fix)) from None
        except ValueError as error:
            raise JobError(Problem(KEY, f"{self.place(_CONFIG)} is not JSON: {error}")) from None
        if not isinstance(config, dict):
            raise JobError(Problem(KEY, f"{self.place(_CONFIG)} is not a JSON object"))
        return config

    def tensors(self, wanted: Iterable[str] | None = None) -> dict[str, HfTensor]:
        """Reads the headers of the files that hold the wanted tensors (None: of all files).

        Returns:
            Tensors by name, including others in the same files; missing tensors are left out.

        Raises:
            CheckpointError: There are no safetensors, or a file is missing, torn or invalid.
        """
        where = self._weight_map()
        if isinstance(where, dict):
            names = list(where) if wanted is None else [name for name in wanted if name in where]
            keys = sorted({where[name] for name in names})
        else:
            keys = where
        with ThreadPoolExecutor(_READERS) as pool:
            found = [tensor for tensors in pool.map(self._header, keys) for tensor in tensors]
        return {tensor.name: tensor for tensor in found}

    def read(self, tensor: HfTensor, first: int, last: int) -> bytes:
        """Reads the bytes of the rows `[first, last)`.

        Raises:
            CheckpointError: The file is missing or torn.
        """
        begin, end = tensor.begin + first * tensor.row_bytes, tensor.begin + last * tensor.row_bytes
        data = self._get(tensor.key, begin, end)
        self.bytes_read += len(data)
        return data

    def rows(self, tensor: HfTensor, first: int, last: int) -> Array:
        """Reads the rows `[first, last)` as an array `[last - first, *shape[1:]]`."""
        values = np.frombuffer(self.read(tensor, first, last), numpy_dtype(tensor.dtype))
        return values.reshape((last - first, *tensor.shape[1:]) if tensor.shape else ())

    def _weight_map(self) -> dict[str, str] | list[str]:
        """Returns each tensor's file if there is an index, else the files' names."""
        try:
            index = json.loads(self.store.get(_INDEX))["weight_map"]
            return {str(name): str(key) for name, key in index.items()}
        except NotFound:
            pass
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                Problem(self.place(_INDEX), f"is not an index of safetensors: {in_words(error)}")
            ) from error
        if self.store.head(_SINGLE) is not None:
            return [_SINGLE]
        here = [info.key for info in self.store.list() if "/" not in info.key]
        keys = sorted(key for key in here if key.endswith(".safetensors"))
        if keys:
            return keys
        pickled = sorted(key for key in here if key.endswith((".bin", ".pt", ".pth", ".ckpt")))
        what, fix = "there are no safetensors", "name a model that save_pretrained wrote and that every node can read"
        if pickled:
            what += f", only {pickled[0]}: raypp loads no pickle"
            fix = "convert the model: load it with transformers, then save_pretrained(…, safe_serialization=True)"
        raise CheckpointError(Problem(self.store.url, what, fix))

    def _header(self, key: str) -> list[HfTensor]:
        """Reads one file's header.

        Raises:
            CheckpointError: See `tensors`.
        """
        length = int.from_bytes(self._get(key, 0, 8), "little")
        try:
            if length > _HEADER_LIMIT:
                raise ValueError(f"a header of {length} bytes")
            document = json.loads(self._get(key, 8, 8 + length))
            document.pop("__metadata__", None)
            tensors, end = [], 0
            for name, saved in document.items():
                begin, stop = saved["data_offsets"]
                tensor = HfTensor(name, saved["dtype"], tuple(saved["shape"]), key, 8 + length + begin)
                if tensor.dtype not in ELEMENT_BYTES:
                    raise ValueError(f"{name} has dtype {tensor.dtype}, which raypp cannot read")
                if stop - begin != prod(tensor.shape) * ELEMENT_BYTES[tensor.dtype]:
                    raise ValueError(f"the byte count of {name} does not match its shape")
                tensors.append(tensor)
                end = max(end, stop)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(Problem(self.place(key), f"is not a safetensors file: {in_words(error)}")) from error
        info = self.store.head(key)
        if info is None or info.size < 8 + length + end:
            have = 0 if info is None else info.size
            raise CheckpointError(Problem(self.place(key), f"is torn: {have} of {8 + length + end} bytes are there"))
        return tensors

    def _get(self, key: str, begin: int, end: int) -> bytes:
        try:
            data = self.store.get(key, begin, end)
        except NotFound:
            raise CheckpointError(Problem(self.place(key), "is missing", "download the model again")) from None
        if len(data) != end - begin:
            raise CheckpointError(Problem(self.place(key), f"is torn: it ends before byte {end}"))
        return data
