"""The gated delta rule (arXiv:2412.06464): linear attention with a state per head and document.

S_t = exp(g_t) · S_{t-1} + k_t ⊗ beta_t · (v_t - exp(g_t) · k_t · S_{t-1}), and the output is
q_t · S_t / sqrt(D). g and beta depend on the token, queries and keys have norm 1. Queries, keys and
values pass a causal convolution before, of which every channel has its own weights.

Tokens are computed in chunks: within one by a triangular system, from one to the next through the
state, all in fp32 or wider. A chunk never crosses the border of a document, where state and
convolution begin anew.

Legend: S tokens of a microbatch on this rank, P pieces: parts of documents that this rank holds, N
chunks of L tokens, H value heads, D width of a key head, V of a value head, C channels of the
convolution, K tokens that it reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.job.decoder_layer import Layer, delta_projections
from raypp.job.layer_rules import CHUNK, DeltaRule
from raypp.job.models import DecoderOptions
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.products import Projection
from raypp.stages.models.recomputed import attention
from raypp.stages.models.rotary import Table
from raypp.stages.models.tensor_ranks import weight_here

_EPS = 1e-6
"""Epsilon of the norm of queries and keys."""


class DepthwiseWeight(nn.Module):
    """The weights of a causal convolution, `[C, 1, K]`."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))


class GatedNorm(nn.Module):
    """RMSNorm in fp32, multiplied by silu of a gate."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalises the last dim of `[..., V]`, given the gate `[..., V]`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(wide), (x.shape[-1],), None, self.eps).to(x.dtype)
        return (self.weight * normed * F.silu(gate.to(wide))).to(x.dtype)


class GatedDeltaRule(nn.Module):
    """What a layer has instead of attention. `layer`: whether the projections are split."""

    block_name = DeltaRule.block

    def __init__(self, options: DecoderOptions, layer: Layer, rule: DeltaRule) -> None:
        super().__init__()
        self.rule, self.split = rule, layer.split_delta
        self.dt_bias = nn.Parameter(torch.empty(rule.value_heads))
        self.A_log = nn.Parameter(torch.empty(rule.value_heads))
        self.conv1d = DepthwiseWeight(rule.channels, rule.kernel)
        for name, rows in delta_projections(rule, layer).items():
            self.add_module(name, Projection(options.hidden_size, rows, bias=False))
        self.norm = GatedNorm(rule.value_dim, options.norm_eps)
        self.out_proj = Projection(rule.values, options.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor, _rotary: Table | None, documents: PackedDocuments) -> Tensor:
        """Mixes the tokens of every document: `[B, T, C]` to `[B, T, C]`. Collective over the cp
        group if `documents.across` is set."""
        mixed_SC, gate_SHV, b_SH, a_SH = self._projected(x_BTC.flatten(0, 1))
        wide = torch.promote_types(x_BTC.dtype, torch.float32)
        decay_SH = -weight_here(self, "A_log").to(wide).exp() * F.softplus(a_SH.to(wide) + weight_here(self, "dt_bias"))
        out_SHV = mixed_by_rule(mixed_SC, decay_SH, b_SH.sigmoid(), weight_here(self.conv1d), self.rule, documents)
        out: Tensor = self.out_proj(self.norm(out_SHV, gate_SHV).view(*x_BTC.shape[:-1], -1))
        return out

    def _projected(self, x_SC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns queries, keys and values `[S, C]`, the gate `[S, H, V]`, and b and a `[S, H]`."""
        rule = self.rule
        if self.split:
            parts = (self.get_submodule(f"in_proj_{name}")(x_SC) for name in ("qkv", "z", "b", "a"))
            mixed, gate, b, a = parts
            return mixed, gate.unflatten(-1, (rule.value_heads, -1)), b, a
        served = rule.value_heads // rule.key_heads
        by_head = self.get_submodule("in_proj_qkvz")(x_SC).unflatten(-1, (rule.key_heads, -1))
        widths = [rule.key_dim, rule.key_dim, served * rule.value_dim, served * rule.value_dim]
        q, k, v, gate = by_head.split(widths, dim=-1)
        b, a = self.get_submodule("in_proj_ba")(x_SC).unflatten(-1, (rule.key_heads, -1)).split(served, dim=-1)
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        return mixed, gate.reshape(len(x_SC), rule.value_heads, -1), b.flatten(1), a.flatten(1)


# Not compiled: document lengths are Python ints, so every microbatch would trigger a recompilation.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def mixed_by_rule(
    mixed_SC: Tensor, decay_SH: Tensor, beta_SH: Tensor, weight_C1K: Tensor, rule: DeltaRule, documents: PackedDocuments
) -> Tensor:
    """Convolves queries, keys and values, and applies the delta rule to every document.

    Args:
        mixed_SC: Queries, keys and values before the convolution, `[S, C]`.
        decay_SH: Logarithms of what the state is multiplied by, `[S, H]`.
        beta_SH: How much of the difference to a value is stored, `[S, H]`, 0 to 1.
        weight_C1K: The weights of the convolution.

    Returns:
        The output `[S, H, V]`.
    """
    states = None if documents.across is None else documents.across.states()
    lengths = documents.lengths if states is None else states.lengths
    before = None if states is None else states.before(mixed_SC, rule.kernel - 1)
    convolved = frugal(partial(convolution, lengths=tuple(lengths)), mixed_SC, weight_C1K, before)
    q, k, v = torch.split(convolved, [rule.keys, rule.keys, rule.values], dim=-1)
    q, k, v = (
        part.view(len(part), heads, -1)
        for part, heads in ((q, rule.key_heads), (k, rule.key_heads), (v, rule.value_heads))
    )
    layout = _layout(tuple(lengths))
    starts = None
    if states is not None:
        starts = states.starts(lambda: frugal(partial(_summary, layout=layout), k, v, decay_SH, beta_SH))
    given = (q, k, v, decay_SH, beta_SH) if starts is None else (q, k, v, decay_SH, beta_SH, starts)
    if states is None:  # the states at the ends are not kept
        kernel = None if documents.kernel is None else documents.kernel.delta
        only: Tensor = attention(partial(frugal, partial(kernel or operators, documents)), *given)
        return only
    out: Tensor
    out, ends = attention(partial(frugal, partial(_applied, layout=layout)), *given)
    states.ended(ends)
    return out


def convolution(
    x_SC: Tensor,
    weight_C1K: Tensor,
    before_PkC: Tensor | None = None,
    *,
    lengths: Sequence[int],
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    """Returns the activation of the causal convolution of every piece, `[S, C]`.

    Args:
        x_SC: The pieces, end to end.
        weight_C1K: The weights; the last is that of the newest token.
        before_PkC: The K - 1 tokens before each piece. None: all begin a document.
        lengths: The tokens of each piece.
    """
    kernel, wide = weight_C1K.shape[-1], torch.promote_types(x_SC.dtype, torch.float32)
    pieces = torch.split(x_SC, list(lengths))
    zeros = x_SC.new_zeros(kernel - 1, x_SC.shape[1])
    before = [zeros] * len(pieces) if before_PkC is None else before_PkC.unbind()
    padded = torch.cat([part for pair in zip(before, pieces, strict=True) for part in pair]).to(wide)
    count, weights = len(padded) - kernel + 1, weight_C1K.to(wide)[:, 0].unbind(-1)
    total = padded[:count] * weights[0]
    for place in range(1, kernel):
        total = total + padded[place : place + count] * weights[place]
    sizes = [size for length in lengths for size in (length, kernel - 1)][:-1]
    return activation(torch.cat(torch.split(total, sizes)[::2])).to(x_SC.dtype)


class _Layout(NamedTuple):
    """Which chunks the pieces have. Chunks are in the order of their place in their piece, so that
    a step computes the same place of all pieces that are so long.

    Attributes:
        length: L.
        sizes: Tokens of each chunk, piece by piece.
        order: The place in `sizes` of each chunk in the order of steps.
        steps: Chunks of each step.
        pieces: The pieces, those with most chunks first.
    """

    length: int
    sizes: list[int]
    order: list[int]
    steps: list[int]
    pieces: list[int]


@lru_cache(maxsize=64)
def _layout(lengths: tuple[int, ...]) -> _Layout:
    length = min(CHUNK, max(lengths))
    chunks = [-(-size // length) for size in lengths]
    pieces = sorted(range(len(lengths)), key=lambda piece: -chunks[piece])
    sizes: list[int] = []
    first: list[int] = []
    for size in lengths:
        first.append(len(sizes))
        sizes += [min(length, size - begin) for begin in range(0, size, length)]
    placed = [(step, first[piece] + step) for step in range(max(chunks)) for piece in pieces if step < chunks[piece]]
    steps = [len(list(group)) for _, group in groupby(placed, key=lambda pair: pair[0])]
    return _Layout(length, sizes, [place for _, place in placed], steps, pieces)


def _chunked(x: Tensor, layout: _Layout) -> Tensor:
    """Cuts tokens `[S, H, ...]` into chunks in the order of steps, `[N, H, L, ...]`; pads by 0."""
    parts, most = torch.split(x, layout.sizes), x.new_zeros(layout.length, *x.shape[1:])
    padded = []
    for place in layout.order:
        padded += [parts[place], most[: layout.length - len(parts[place])]]
    return torch.cat(padded).view(-1, layout.length, *x.shape[1:]).transpose(1, 2)


def _joined(out_NHLV: Tensor, layout: _Layout) -> Tensor:
    """Returns the tokens `[S, H, V]` of chunks."""
    parts: list[Tensor] = [out_NHLV] * len(layout.order)
    for part, place in zip(out_NHLV.transpose(1, 2).unbind(), layout.order, strict=True):
        parts[place] = part[: layout.sizes[place]]
    return torch.cat(parts)


@dataclass
class _Chunks:
    """What is known of chunks without a state.

    Attributes:
        values: What is stored if the state is 0, `[N, H, L, V]`.
        keys: What is read of the state and subtracted, `[N, H, L, D]`.
        kept: Keys, times the decay until the end, `[N, H, L, D]`.
        decay: Of the state over the chunk, `[N, H, 1, 1]`.
        queries: Times the decay since the beginning, `[N, H, L, D]`; None without queries.
        scores: Of queries with keys, `[N, H, L, L]`; None without queries.
    """

    values: Tensor
    keys: Tensor
    kept: Tensor
    decay: Tensor
    queries: Tensor | None = None
    scores: Tensor | None = None


def within_chunks(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, q: Tensor | None = None) -> _Chunks:
    """Computes what needs no state: the form of arXiv:2412.06464, section 3.3.

    Args:
        k: Keys `[N, key heads, L, D]`.
        v: Values `[N, H, L, V]`.
        g: Logarithms of the decay, `[N, H, L]`.
        beta: `[N, H, L]`.
        q: Queries like the keys.
    """
    served = v.shape[1] // k.shape[1]
    k = _copied(_unit(k), served)
    # Sums of g from each token to each later one. Differences of sums from the first token on would
    # lose digits where the state decays fast, other ones in chunks cut elsewhere.
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    sums = g[..., None].expand(*g.shape, g.shape[-1]).masked_fill(~later.mT, 0).cumsum(-2)
    between = sums.masked_fill(later, -torch.inf).exp()
    since = (sums[..., :1] + g[..., :1, None]).exp()
    stored = k * beta[..., None]
    system = (stored @ k.mT) * between
    right = torch.cat((v * beta[..., None], stored * since), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    chunks = _Chunks(values, keys, k * between[..., -1, :, None], since[..., -1:, :])
    if q is not None:
        q = _copied(_unit(q), served) * q.shape[-1] ** -0.5
        chunks.queries, chunks.scores = q * since, (q @ k.mT) * between
    return chunks


def _copied(x_NHLD: Tensor, times: int) -> Tensor:
    """Returns every key head `times` times in turn."""
    return x_NHLD[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def _cut(tensors: Sequence[Tensor], layout: _Layout) -> list[Tensor]:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return [_chunked(one.to(wide), layout) for one in tensors]


def _applied(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor | None = None,
    *,
    layout: _Layout,
    within: Callable[..., _Chunks] = within_chunks,
) -> tuple[Tensor, Tensor]:
    """Returns the output `[S, H, V]`, and the states after the pieces, `[P, H, D, V]`. Takes tokens
    `[S, heads, width]` and `[S, H]`, and the states before the pieces, if not 0."""
    q_N, k_N, v_N, g_N, beta_N = _cut((q, k, v, g, beta), layout)
    chunks = within(k_N, v_N, g_N, beta_N, q_N)
    if starts is None:
        starts = v_N.new_zeros(len(layout.pieces), v_N.shape[1], k.shape[-1], v.shape[-1])
    out, ends = _scanned(chunks, starts, layout)
    return _joined(out, layout).to(v.dtype), ends


def operators(documents: PackedDocuments, *inputs: Tensor, within: Callable[..., _Chunks] = within_chunks) -> Tensor:
    """Returns the output of whole documents, `[S, H, V]`; takes what `fla_delta_rule.chunked` does.
    `within`: `within_chunks`, which may be compiled."""
    return _applied(*inputs, layout=_layout(documents.lengths), within=within)[0]


def _summary(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, layout: _Layout) -> Tensor:
    """Returns how a piece changes the state S, to M · S + U: U and M, `[P, H, D, V + D]`."""
    chunks = within_chunks(*_cut((k, v, g, beta), layout))
    width = k.shape[-1]
    chunks.values = F.pad(chunks.values, (0, width))
    one = torch.eye(width, dtype=chunks.values.dtype, device=k.device)
    starts = F.pad(one, (v.shape[-1], 0)).expand(len(layout.pieces), v.shape[1], -1, -1)
    return _scanned(chunks, starts, layout)[1]


def _scanned(chunks: _Chunks, starts: Tensor, layout: _Layout) -> tuple[Tensor, Tensor]:
    """Goes through the chunks of all pieces, from the states before them. Returns the outputs
    `[N, H, L, V]`, without queries nothing, and the states after the pieces."""
    state = _reordered(starts, layout.pieces)
    parts = [torch.split(part, layout.steps) for part in (chunks.values, chunks.keys, chunks.kept, chunks.decay)]
    asked = None
    if chunks.queries is not None and chunks.scores is not None:
        both = (torch.split(part, layout.steps) for part in (chunks.queries, chunks.scores))
        asked = list(zip(*both, strict=True))
    outs, ends = [], []
    for step, (values, keys, kept, decay) in enumerate(zip(*parts, strict=True)):
        if len(values) < len(state):
            state, ended = state.tensor_split([len(values)])
            ends.append(ended)
        new = values - keys @ state
        if asked is not None:
            queries, scores = asked[step]
            outs.append(queries @ state + scores @ new)
        state = state * decay + kept.mT @ new
    ends.append(state)
    places = sorted(range(len(layout.pieces)), key=layout.pieces.__getitem__)
    return torch.cat(outs) if outs else chunks.values[:0], _reordered(torch.cat(ends[::-1]), places)


def _reordered(x_P: Tensor, places: Sequence[int]) -> Tensor:
    if list(places) == [*range(len(places))]:
        return x_P
    pieces = x_P.unbind()
    return torch.stack([pieces[place] for place in places])


def frugal(compute: Callable[..., Any], *inputs: Tensor | None) -> Any:
    """Returns `compute(*inputs)`, whose backward keeps the inputs and computes the rest again."""
    return _Frugal.apply(compute, *inputs)  # type: ignore[no-untyped-call]


class _Frugal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *inputs: Tensor | None) -> Any:
        """Returns what `compute` does, a tensor `[...]` or several."""
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients `[...]` of the inputs."""
        needed = ctx.needs_input_grad[1:]
        leaves = [
            None if one is None else one.detach().requires_grad_(needs)
            for one, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            results = ctx.compute(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        trained: list[Any] = [leaf for leaf, needs in zip(leaves, needed, strict=True) if needs]
        found = iter(torch.autograd.grad(results, trained, gradients, allow_unused=True))
        return None, *(next(found) if needs else None for needs in needed)
