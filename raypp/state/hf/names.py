"""Names of raypp's and Hugging Face's tensors: the same, except for experts.

raypp stacks a layer's experts: `….experts.gate_proj` `[E, F, C]`. In Hugging Face's files each
expert has its own tensor, `….experts.3.gate_proj.weight` `[F, C]`: row 3 of the stack. Where a
stack is one tensor in the files, too, `….experts.fused_down_proj` is their `….experts.down_proj`,
and what Gemma 4 has in a layer, raypp has in `….moe`.

Legend: E experts, F expert hidden size, C hidden size.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raypp.errors import JobError, Problem
from raypp.job.family import Shape
from raypp.job.known_families import FAMILIES, family_of
from raypp.job.lora import in_files, one_in_files
from raypp.job.models import DecoderOptions

_STACK = re.compile(r"(.+\.experts)\.(\w+)")


@dataclass(frozen=True)
class HfPart:
    """One tensor of a Hugging Face model, as part of a global tensor. `name`: its name in the
    files. `expert`: its index in the stack; None: it is the whole global tensor."""

    name: str
    shape: Shape
    expert: int | None = None


def hf_parts(name: str, shape: Sequence[int]) -> Iterator[HfPart]:
    """Yields the file tensors that make up a global tensor, in its order."""
    match = None if one_in_files(name) else _STACK.fullmatch(name)
    if match is None:
        yield HfPart(in_files(name), tuple(shape))
        return
    for expert in range(shape[0]):
        yield HfPart(f"{match[1]}.{expert}.{match[2]}.weight", tuple(shape[1:]), expert)


def model_tensors(options: DecoderOptions) -> dict[str, Shape]:
    """Returns global names and shapes of a model, not built. Raises JobError: an unknown family."""
    family = family_of(options)
    if family is None:
        fault = f"only {options.kind}'s own code knows its tensors"
        raise JobError(Problem("model.kind", fault, f"use one of: {', '.join(FAMILIES)}"))
    return {name: weight.shape for name, weight in family.model_weights(options).items()}


def state_names(options: DecoderOptions) -> frozenset[str]:
    """Returns the global names of what is no weight and stays in fp32."""
    family = family_of(options)
    return frozenset() if family is None else family.state_names(options)
