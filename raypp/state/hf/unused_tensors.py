"""The tensors of a model's files that no parameter takes, such as those of a tower of vision.

The export of a run that began with a multimodal model puts them back as they were.
"""

import re
from collections import Counter
from collections.abc import Iterator
from math import prod

from raypp.errors import JobError, Problem
from raypp.job.models import DecoderOptions
from raypp.state.hf.model_files import HEAD, KEY, HfFiles, base_identity
from raypp.state.hf.names import hf_parts, model_tensors
from raypp.state.hf.tensor import HfTensor, whole_name
from raypp.untrusted.safetensors_header import ELEMENT_BYTES
from raypp.untrusted.text import visible

_PROCESSOR = re.compile(r"\w*processor_config\.json|chat_template\.json")
_PROCESSOR_BYTES = 16 << 20
_SHOWN = 4


def unused_tensors(files: HfFiles, model: DecoderOptions) -> list[HfTensor]:
    """Returns the tensors of a model's files that no parameter takes. Raises CheckpointError: there
    are no safetensors, or the headers cannot be read; StoreError: the store does not answer."""
    needed = {part.name for name, shape in model_tensors(model).items() for part in hf_parts(name, shape)}
    needed.add(HEAD)  # may be the embedding
    there = files.tensors()
    parts = {name for name in there if whole_name(name) != name and whole_name(name) in there}
    return [tensor for name, tensor in there.items() if name not in needed | parts]


def unused_weights(files: HfFiles, model: DecoderOptions) -> str:
    """Returns how many tensors no parameter takes, and what becomes of them; empty for none. Raises
    CheckpointError, StoreError: see `unused_tensors`."""
    left = unused_tensors(files, model)
    kinds = Counter(re.sub(r"\d+", "N", visible(tensor.name)) for tensor in left).most_common(_SHOWN)
    listed = ", ".join(f"{kind} ({count:,})" for kind, count in kinds)
    size = sum(prod(tensor.shape) * ELEMENT_BYTES[tensor.dtype] for tensor in left)
    fault = f"{len(left):,} tensors of {files.store.url}, {size:,} bytes, are not used, no parameter takes them"
    kept = "; an export puts them back" if model.original is not None and model.original.rest else ""
    return f"{fault}{kept}: {listed}" if left else ""


class Rest:
    """What an export puts back beside the text of a multimodal model. `options`: the `model:`
    section of the run, whose `original` has a rest. `files`: the model that the run began with.
    `names`: the names in the files of the text's tensors, by those that they have here. Raises
    JobError: the model is gone, or another; CheckpointError: its headers cannot be read."""

    def __init__(self, options: DecoderOptions) -> None:
        assert options.original is not None and options.original.rest is not None
        self.files = HfFiles(options.from_hf or options.original.rest)
        if base_identity(self.files) != options.original.rest_id:
            fault = f"{self.files.store.url} does not hold the weights that the run began with"
            fix = "copy that model back: the export takes from it what is not text"
            raise JobError(Problem(KEY, fault, fix))
        self.tensors = unused_tensors(self.files, options)
        self.names = {name: tensor.name for name, tensor in self.files.tensors().items()}

    def pieces(self, tensor: HfTensor, most: int) -> Iterator[bytes]:
        """Yields the bytes of a tensor, about `most` at a time."""
        for first, last in tensor.pieces(most):
            yield self.files.read(tensor, first, last)

    def processor_files(self) -> dict[str, bytes]:
        """Returns the files of the processor, which prepares images and sound for the model."""
        keys = [info.key for info in self.files.listed() if _PROCESSOR.fullmatch(info.key)]
        return {key: self.files.store.get(key, 0, _PROCESSOR_BYTES) for key in keys}
