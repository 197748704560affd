"""The tensors of a whole model, from the checkpoint of a run that trained adapters: W + s · B · A,
with the interface of `checkpoint.saved_tensors.SavedTensors`, a few rows at a time."""

from collections import Counter

import numpy as np

from raypp.errors import CheckpointError, JobError, Problem
from raypp.job.lora import (
    BLOCK,
    NF4,
    Adapter,
    Base,
    adapter_names,
    also_trained,
    model_adapters,
    quantised_base,
    quantised_names,
)
from raypp.job.models import DecoderOptions
from raypp.job.precision import DTYPES, FP32, LARGEST_FP8
from raypp.state.checkpoint.arrays import Array, convert
from raypp.state.checkpoint.saved_tensors import SavedTensors, TensorInfo
from raypp.state.hf.model_files import HfFiles, matching_tensors, with_base_id
from raypp.state.hf.names import hf_parts, model_tensors, state_names

_WIDE = "F32"


class MergedTensors:
    """The merged weights in fp32, by global name.

    Args:
        saved: The adapters, and what was trained beside them.
        options: The `model:` section of the run; it has `lora`.

    Attributes:
        dtype: safetensors' name of the dtype of most frozen weights.

    Raises:
        JobError: The run had no `model.from_hf`, or it holds other weights by now.
        CheckpointError: The checkpoint lacks an adapter, or what was trained beside them.
    """

    def __init__(self, saved: SavedTensors, options: DecoderOptions) -> None:
        if options.from_hf is None:
            fault = "the run's frozen weights were drawn from train.seed: no file holds them"
            raise JobError(Problem("model.from_hf", fault, "export the adapters (--adapter)"))
        self._saved, self._options = saved, options
        shapes = model_tensors(options)
        self.infos = {name: TensorInfo(name, _WIDE, shape) for name, shape in shapes.items()}
        self._adapters: dict[str, tuple[Adapter, tuple[str, str]]] = {}
        self._whole = also_trained(options)
        trained = dict(self._whole)
        for name, adapter in model_adapters(options).items():
            pair = adapter_names(name, adapter)
            trained |= zip(pair, (adapter.a, adapter.b), strict=True)
            self._adapters[name if adapter.stacked else f"{name}.weight"] = adapter, pair
        for name, weight in trained.items():
            info = saved.infos.get(name)
            if info is None or info.shape != weight.shape:
                raise CheckpointError(Problem(name, f"is not in the checkpoint with shape {list(weight.shape)}"))
        self._quantised, self._state = quantised_names(options), state_names(options)
        self._files = HfFiles(options.from_hf)
        with_base_id(options, self._files)
        self._there = matching_tensors(self._files, shapes)
        ((self.dtype, _),) = Counter(tensor.dtype for tensor in self._there.values()).most_common(1)

    @property
    def remarks(self) -> list[str]:
        """What the user should know of the merged weights."""
        base = quantised_base(self._options)
        if base is None:
            return []
        fault = f"{len(self._quantised)} frozen tensors were dequantised from {base}, as the adapters were trained on"
        return [f"{fault}: they are not the weights of the model that model.from_hf names"]

    def rows(self, name: str, first: int, last: int) -> Array:
        """Returns the rows `[first, last)` of a merged tensor, in fp32."""
        if name in self._whole:
            return self._wide(name, first, last)
        base = self._base(name, first, last)
        if name not in self._adapters:
            return base
        adapter, (a, b) = self._adapters[name]
        assert self._options.lora is not None
        right_rows = (first, last) if adapter.stacked else (0, self._saved.infos[a].rows)
        product = self._wide(b, first, last) @ self._wide(a, *right_rows)
        return base + np.float32(self._options.lora.scale) * (
            product.swapaxes(-1, -2) if adapter.transposed else product
        )

    def _wide(self, name: str, first: int, last: int) -> Array:
        """Returns rows of a trained tensor in fp32."""
        return convert(self._saved.rows(name, first, last), self._saved.infos[name].dtype, _WIDE)

    def _base(self, name: str, first: int, last: int) -> Array:
        """Returns rows of the frozen weights as training used them, in fp32."""
        shape = self.infos[name].shape
        parts = list(hf_parts(name, shape))
        if parts[0].expert is None:
            tensor = self._there[parts[0].name]
            base = convert(self._files.rows(tensor, first, last), tensor.dtype, _WIDE)
        else:
            tensors = [self._there[part.name] for part in parts[first:last]]
            base = np.stack([convert(self._files.rows(t, 0, t.shape[0]), t.dtype, _WIDE) for t in tensors])
        return self._as_stored(name, base)

    def _as_stored(self, name: str, rows: Array) -> Array:
        """Returns rows in fp32 with the rounding of `model.lora.base`."""
        base = quantised_base(self._options)
        if base is not None and name in self._quantised:
            return rounded(rows, base)
        if name in self._state:
            return rows
        assert self._options.lora is not None
        kept = DTYPES.get(self._options.lora.base, FP32).saved
        return convert(convert(rows, _WIDE, kept), kept, _WIDE)


# What quantising does to weights, without torch.
#
# The numbers are those of `models.quantised_rows`, bit for bit, as a unit test shows.
#
# Legend: M rows, C weights in a row.

_TINY = np.finfo(np.float32).tiny


def rounded(rows_MC: Array, base: Base) -> Array:
    """Returns weights quantised and dequantised. `rows_MC`: whole rows, `[..., M, C]`, fp32."""
    through = {"int8": _through_int8, "fp8": _through_fp8, "nf4": _through_nf4}[base]
    return through(rows_MC)


def _through_int8(rows_MC: Array) -> Array:
    scale: Array = np.abs(rows_MC).max(-1, keepdims=True) / np.float32(127)
    codes: Array = np.clip(np.rint(rows_MC / np.maximum(scale, _TINY)), -127, 127)
    return np.multiply(codes, scale)


def _through_fp8(rows_MC: Array) -> Array:
    scale: Array = np.maximum(np.abs(rows_MC).max(-1, keepdims=True) / np.float32(LARGEST_FP8), _TINY)
    values: Array = rows_MC / scale
    exponents = np.maximum(np.frexp(values)[1] - 1, -6)  # below, numbers are subnormal
    step: Array = np.ldexp(np.float32(1), exponents - 3)
    rounded_MC: Array = np.rint(values / step) * step * scale
    return rounded_MC


def _through_nf4(rows_MC: Array) -> Array:
    table: Array = np.array(NF4, np.float32)
    blocks: Array = rows_MC.reshape(*rows_MC.shape[:-1], -1, BLOCK)
    scales: Array = np.abs(blocks).max(-1, keepdims=True)
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, blocks / np.maximum(scales, _TINY))
    step: Array = scales.max(-2, keepdims=True) / np.float32(255**2)
    k: Array = np.minimum(np.rint(np.sqrt(scales / np.maximum(step, _TINY))), np.float32(255))
    values: Array = table[codes] * (step * (k * k))
    return values.reshape(rows_MC.shape)
