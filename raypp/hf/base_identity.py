"""The identity of the weights that adapters belong to: what `model.from_hf` names.

Two models of one family, a base and its fine-tune, have the same sizes and headers. So the identity
also covers samples of every file, which are read by ranges: some hundred KB of a model of any size.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

from raypp.errors import JobError, Problem
from raypp.hf.config import KEY
from raypp.hf.model_files import HfFiles
from raypp.spec.models import DecoderOptions

_SAMPLES = 4
_SAMPLE_BYTES = 16 << 10
_READERS = 8


def base_identity(files: HfFiles) -> str | None:
    """Returns the identity of a model's weights, the same wherever its files lie.

    It depends on the sizes of the safetensors files, on their beginnings and on samples of their
    tensors, but not on their names.

    Returns:
        16 hexadecimal digits; None if there are no safetensors.

    Raises:
        StoreError: The store does not answer.
    """
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
    """Returns the `model:` section with `lora.base_id` set; unchanged without `model.lora`.

    Raises:
        JobError: `lora.base_id` is set, and the files are those of another model.
    """
    if options.lora is None:
        return options
    own, known = base_identity(files), options.lora.base_id
    if known is not None and own is not None and own != known:
        fault = f"{files.store.url} holds other weights ({own}) than those the adapters belong to ({known})"
        raise JobError(Problem(KEY, fault, "name the model that the run began with, or start a new run"))
    return options.model_copy(update={"lora": options.lora.model_copy(update={"base_id": own or known})})
