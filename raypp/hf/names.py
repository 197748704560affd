"""raypp's tensors and Hugging Face's: the same names, but for experts.

raypp stacks a layer's experts: `….experts.gate_proj` `[E, F, C]`. In Hugging Face's files each expert has a tensor of
its own, `….experts.3.gate_proj.weight` `[F, C]`: row 3 of the stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raypp.errors import JobError, Problem
from raypp.hf.config import FAMILIES
from raypp.spec.models import DecoderOptions, MoeOptions

Shape = tuple[int, ...]
_STACK = re.compile(r"(.+\.experts)\.(\w+)")
_EXPERT_MATRICES = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


@dataclass(frozen=True)
class HfPart:
    """One tensor of a Hugging Face model, as part of a global one.

    Attributes:
        name: In their files.
        shape: There.
        expert: Its index in the stack; None: it is the whole global tensor.
    """

    name: str
    shape: Shape
    expert: int | None = None


def hf_parts(name: str, shape: Sequence[int]) -> Iterator[HfPart]:
    """The tensors of their files that make up a global tensor, in its order."""
    match = _STACK.fullmatch(name)
    if match is None:
        yield HfPart(name, tuple(shape))
        return
    for expert in range(shape[0]):
        yield HfPart(f"{match[1]}.{expert}.{match[2]}.weight", tuple(shape[1:]), expert)


def model_tensors(options: DecoderOptions) -> dict[str, Shape]:
    """Global names and shapes of a whole model, without building it.

    Raises:
        JobError: It is none of raypp's own families.
    """
    if options.kind not in FAMILIES:
        what = f"the tensors of {options.kind} are known to its own code only"
        raise JobError(Problem("model.kind", what, f"there are: {', '.join(FAMILIES)}"))
    width, vocabulary = options.hidden_size, options.vocab_size
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, width)}
    for index in range(options.num_layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in _layer(options)}
    tensors["model.norm.weight"] = (width,)
    if not options.tie_embeddings:
        tensors["lm_head.weight"] = (vocabulary, width)
    return tensors


def _layer(options: DecoderOptions) -> Iterator[tuple[str, Shape]]:
    width, head = options.hidden_size, options.dim_per_head
    queries, keys = options.num_heads * head, options.kv_heads * head
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"self_attn.{name}.weight", (rows, width)
        if options.kind == "qwen2":
            yield f"self_attn.{name}.bias", (rows,)
    yield "self_attn.o_proj.weight", (width, queries)
    if options.kind in ("qwen3", "qwen3_moe"):
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)
    yield "input_layernorm.weight", (width,)
    yield "post_attention_layernorm.weight", (width,)
    if not isinstance(options, MoeOptions):
        inner = options.ffn_size
        yield "mlp.gate_proj.weight", (inner, width)
        yield "mlp.up_proj.weight", (inner, width)
        yield "mlp.down_proj.weight", (width, inner)
        return
    block = "block_sparse_moe" if options.kind == "mixtral" else "mlp"
    experts, inner = options.num_experts, options.expert_ffn_size
    gate, up, down = _EXPERT_MATRICES[options.kind]
    yield f"{block}.gate.weight", (experts, width)
    yield f"{block}.experts.{gate}", (experts, inner, width)
    yield f"{block}.experts.{up}", (experts, inner, width)
    yield f"{block}.experts.{down}", (experts, width, inner)
