"""The ranks that compute a stage's blocks together (mesh.tp), and what they send each other.

Between blocks each holds an equal part of every row's tokens. A block takes all of them, each rank
computes its heads or its part of the inner width, and the sums of these parts are spread again.
Rows of one token have no parts: while decoding (`tokens_whole`), each rank holds every token.

Legend: B rows, T tokens of a row, t = T / tp of a rank, C residual width, V vocabulary, v = V / tp
of a rank, s tokens of a chunk.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from raypp.stages.models.grouped_products import held


class TensorRanks:
    """The ranks of a tp group. Each method is collective over them, as is its backward, but for
    `own` and `part`. `vocabulary`: V. `whole`: each holds all tokens between blocks, t = T."""

    def __init__(self, group: dist.ProcessGroup, vocabulary: int) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.vocabulary, self.whole = vocabulary, False

    def part(self, rows: int, unit: int = 1) -> range:
        """Returns this rank's rows: equal parts, but for the last. Of fewer units than ranks, such
        as key heads of `unit` rows, several ranks have the same."""
        if rows // unit < self.size and unit > 1:
            first = self.rank * (rows // unit) // self.size * unit
            return range(first, first + unit)
        each = -(-rows // self.size)
        return range(min(rows, self.rank * each), min(rows, (self.rank + 1) * each))

    def total(self, values: Tensor) -> Tensor:
        """Returns the sum of the ranks' values `[...]`. The backward sums their gradients."""
        out: Tensor = _Total.apply(values, self)  # type: ignore[no-untyped-call]
        return out

    def gathered(self, x_BtC: Tensor) -> Tensor:
        """Returns the tokens of all ranks, `[B, T, C]`. The backward sums the ranks' gradients."""
        if self.whole:
            return x_BtC
        out: Tensor = _Gathered.apply(x_BtC, self)  # type: ignore[no-untyped-call]
        return out

    def spread(self, part_BTC: Tensor) -> Tensor:
        """Returns the ranks' sum of parts `[B, T, C]`, for this rank's tokens: `[B, t, C]`."""
        if self.whole:
            return self.total(part_BTC)
        out: Tensor = _Spread.apply(part_BTC, self)  # type: ignore[no-untyped-call]
        return out

    def let_go(self, x_BTC: Tensor, x_BtC: Tensor, result: Tensor) -> None:
        """Frees the memory of x `[B, T, C]`, which `gathered` gave for x `[B, t, C]`. It is filled
        again when the backward of `result` `[...]` begins; until then nothing may read it."""
        if (node := result.grad_fn) is None:
            return
        x_BtC, whole = x_BtC.detach(), [x_BTC.data]  # with a version of its own: autograd checks that of x

        def gather_again(_: Any) -> None:
            x_BTC = whole.pop()  # from here on, it belongs to what needs it
            x_BTC.untyped_storage().resize_(size)
            x_BTC.copy_(_gather(x_BtC, self))

        size = x_BTC.untyped_storage().size()
        x_BTC.untyped_storage().resize_(0)
        node.register_prehook(gather_again)

    def own(self, x_BT: Tensor) -> Tensor:
        """Returns this rank's tokens of `[B, T]`, `[B, t]`. Sends nothing."""
        return x_BT if self.whole else x_BT.chunk(self.size, dim=1)[self.rank]

    def whole_logits(self, logits_v: Tensor) -> Tensor:
        """Returns logits `[..., V]`, of this rank's part `[..., v]`. No backward."""
        each = -(-self.vocabulary // self.size)
        padded = F.pad(logits_v.detach(), (0, each - logits_v.shape[-1]))
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat(parts, dim=-1)[..., : self.vocabulary]

    def largest(self, values: Tensor) -> Tensor:
        """Returns the largest of the ranks' values `[...]`, in their memory. No backward."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def summed(self, values: Tensor) -> Tensor:
        """Returns the sum of the ranks' values `[...]`, in their memory. No backward."""
        dist.all_reduce(values, group=self.group)
        return values


class _Gathered(torch.autograd.Function):
    """`TensorRanks.gathered`."""

    @staticmethod
    def forward(ctx: Any, x_BtC: Tensor, ranks: TensorRanks) -> Tensor:
        """Returns `[B, T, C]`."""
        ctx.ranks = ranks
        return _new(_gather(x_BtC, ranks))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient `[B, t, C]`."""
        return _scatter(gradient, ctx.ranks), None


class _Spread(torch.autograd.Function):
    """`TensorRanks.spread`."""

    @staticmethod
    def forward(ctx: Any, part_BTC: Tensor, ranks: TensorRanks) -> Tensor:
        """Returns `[B, t, C]`."""
        ctx.ranks = ranks
        return _new(_scatter(part_BTC, ranks))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient `[B, T, C]`."""
        return _gather(gradient, ctx.ranks), None


class _Total(torch.autograd.Function):
    """`TensorRanks.total`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: TensorRanks) -> Tensor:
        """Returns the sum `[...]`."""
        ctx.ranks = ranks
        return _new(ranks.summed(values.clone()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the sum of the gradients `[...]`."""
        return ctx.ranks.summed(gradient.clone()), None


@contextmanager
def tokens_whole(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Within it, each rank that computes blocks of the stages holds all tokens. No backward."""
    found = [ranks for stage in stages if (ranks := getattr(stage, "tensor", None)) is not None]
    for ranks in found:
        ranks.whole = True
    try:
        yield
    finally:
        for ranks in found:
            ranks.whole = False


@dataclass(frozen=True)
class MatrixCut:
    """How the ranks of a tp group share a product with a matrix `[O, C]`. By default they do not.

    Attributes:
        inputs: They have parts of its columns, and of each row of the input.
        gradients: They have some of its rows, and parts of each row of the gradient.
        rows: O.
        shared: If several ranks compute with the same rows: those of this rank, in their order, and
            whether it is the first that has them.
    """

    inputs: TensorRanks | None = None
    gradients: TensorRanks | None = None
    rows: int = 0
    shared: tuple[tuple[int, int, bool], ...] = ()

    def once(self, grad_No: Tensor) -> Tensor:
        """Returns a gradient of this rank's rows, `[N, o]`. Of shared ones the first rank gets what
        all have, the others zeros: a sum of rounded parts is not the rounded sum."""
        if self.gradients is None or not self.shared:
            return grad_No
        whole_NO, first = grad_No.new_zeros(len(grad_No), self.rows), 0
        for start, stop, _ in self.shared:
            whole_NO[:, start:stop] = grad_No[:, first : first + stop - start]
            first += stop - start
        self.gradients.summed(whole_NO)
        return torch.cat([whole_NO[:, start:stop] * mine for start, stop, mine in self.shared], dim=1)


WHOLE = MatrixCut()


def weight_here(module: nn.Module, name: str = "weight") -> Tensor:
    """Returns the rows of a module's parameter `[...]` that this rank computes with: all it has,
    unless `rows_here` of the module names them."""
    whole = held(getattr(module, name))
    rows: list[tuple[int, int]] | None = getattr(module, "rows_here", None)
    if rows is None:
        return whole
    parts = [whole[start:stop] for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _new(result: Tensor) -> Tensor:
    """Returns what a collective wrote, `[...]`. In compiled code, torch 2.11 gives such a tensor a
    gradient of zeros, so there it is a new one."""
    return result.clone() if torch.compiler.is_compiling() else result


def _gather(x_BtC: Tensor, ranks: TensorRanks) -> Tensor:
    rows, part, width = x_BtC.shape
    x_RC = x_BtC.new_empty(ranks.size * rows * part, width)
    dist.all_gather_into_tensor(x_RC, x_BtC.reshape(-1, width), group=ranks.group)
    return x_RC.view(ranks.size, rows, part, width).transpose(0, 1).reshape(rows, ranks.size * part, width)


def _scatter(x_BTC: Tensor, ranks: TensorRanks) -> Tensor:
    rows, tokens, width = x_BTC.shape
    part = tokens // ranks.size
    # Two dims: torch 2.11 cannot compile the sum over a first dim that it knows, as of one row.
    x_RC = x_BTC.view(rows, ranks.size, part, width).transpose(0, 1).reshape(-1, width)
    out_NC = x_BTC.new_empty(rows * part, width)
    dist.reduce_scatter_tensor(out_NC, x_RC.contiguous(), group=ranks.group)
    return out_NC.view(rows, part, width)
