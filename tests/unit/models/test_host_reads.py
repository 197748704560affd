"""A layer with experts reads sizes from the device once per forward, and never in a recomputation.

Fake tensors have no values: whatever needs a value on the host raises, for example `item`,
`tolist`, `bincount`, `nonzero`, and `repeat_interleave` without the size of its result.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raypp.job.decoder_layer import Layer
from raypp.job.models import MoeOptions
from raypp.stages.models import experts
from raypp.stages.models.experts import StackedExperts, grouped, inverse, repeated
from raypp.stages.models.moe import MixtureOfExperts
from raypp.stages.models.recomputed import once, recomputed
from raypp.stages.parallel import expert
from raypp.stages.parallel.expert import ExpertExchange, _Counts
from raypp.torch_private import DispatchMode, fake_tensors

NAMES = ("gate_proj", "up_proj", "down_proj")
LABELLED = torch.arange(18).view(2, 9) % 4 > 0


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def new_block(group: dist.ProcessGroup | None = None) -> MixtureOfExperts:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 31, "num_experts": 6}
    options = MoeOptions(kind="qwen3_moe", experts_per_token=3, expert_ffn_size=24, **sizes)
    block = MixtureOfExperts(options, Layer(mlp="experts"))
    block.exchange = None if group is None else ExpertExchange(group)
    return block


def random_block(group: dist.ProcessGroup | None = None) -> MixtureOfExperts:
    block, generator = new_block(group), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return block


def rows() -> torch.Tensor:
    return torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()


def reads_in(function: Callable[[], Any]) -> int:
    """Counts how often a tensor's values are given to Python while a function runs."""
    found = 0

    def see(_frame: Any, event: str, called: Any) -> None:
        nonlocal found
        found += event == "c_call" and getattr(called, "__name__", "") in ("tolist", "item", "cpu", "__bool__")

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("spread", [False, True], ids=["on one rank", "spread over ranks"])
def test_a_forward_reads_sizes_once_and_its_recomputation_never(
    spread: bool, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, x, found = random_block(group if spread else None), rows(), []
    for module in (experts, expert):
        monkeypatch.setattr(module, "once", lambda compute: found.append(once(compute)) or found[-1])
    out: list[torch.Tensor] = []
    assert reads_in(lambda: out.append(recomputed(block)(x, LABELLED))) == 1
    assert reads_in(out[0].sum().backward) == 0
    assert len(found) == 2 and found[0] is found[1]
    with fake_tensors() as fake:
        faked = new_block(group if spread else None)
        with pytest.raises(Exception, match=r"_local_scalar_dense|data-dependent|DataDependent"):
            faked(fake.from_tensor(x), fake.from_tensor(LABELLED))
        for module in (experts, expert):
            monkeypatch.setattr(module, "once", lambda compute: found[0])
        result = faked(fake.from_tensor(x), fake.from_tensor(LABELLED))
        result.sum().backward()
    assert result.shape == x.shape


class Queued(DispatchMode):
    """Keeps the names of operators, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_sizes_after_it_has_queued_all_that_needs_none(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[str] = []
    sizes, queued = _Counts.sizes, Queued()

    def waits(counts: _Counts) -> Any:
        before.extend(queued.names)
        return sizes(counts)

    monkeypatch.setattr(_Counts, "sizes", waits)
    block, x = random_block(group), rows()
    with queued:
        block(x, LABELLED)
    exchanged = next(index for index, name in enumerate(before) if "alltoall" in name)
    after = before[exchanged + 1 :]
    assert {"sort.stable", "index_select", "logsumexp"} <= set(after) and len(after) >= 20, after


def test_the_grouped_kernel_reads_nothing() -> None:
    with fake_tensors():
        inputs = [torch.empty(size, dtype=torch.bfloat16) for size in ((8, 16), (4, 24, 16), (4, 24, 16), (4, 16, 24))]
        leaves = [tensor.requires_grad_() for tensor in inputs]
        out = grouped(leaves[0], torch.empty(4, dtype=torch.int64), *leaves[1:])
        (out * torch.empty_like(out)).sum().backward()
        assert [tensor.grad.shape for tensor in leaves] == [tensor.shape for tensor in leaves]


def test_what_was_computed_once_returns_in_order_in_a_recomputation() -> None:
    numbers, found = iter(range(10)), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        found.append([once(lambda: next(numbers)) for _ in range(3)])
        return x.sin().cos()

    recomputed(forward)(rows()).sum().backward()
    assert found == [[0, 1, 2], [0, 1, 2]]
    assert once(lambda: next(numbers)) == 3


@pytest.mark.parametrize("spread", [False, True], ids=["on one rank", "spread over ranks"])
def test_a_recomputed_layer_has_the_gradients_of_one_that_is_not(spread: bool, group: dist.ProcessGroup) -> None:
    found = []
    for wrap in (lambda block: block, recomputed, partial(recomputed, keeps=True)):
        block, x = random_block(group if spread else None), rows()
        out = wrap(block)(x, LABELLED)
        out.square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in block.parameters())])
    for others in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], others, strict=True))


def test_a_tokens_gradient_adds_up_its_choices_in_their_order() -> None:
    """As that of an expanded tensor does: bit for bit."""
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    order = torch.randperm(200, generator=torch.Generator().manual_seed(2))
    weights = torch.randn(200, 16, generator=torch.Generator().manual_seed(3))
    expanded = x[:, None].expand(-1, 5, -1).reshape(-1, 16)[order]
    (wanted,) = torch.autograd.grad((expanded * weights).sum(), x)
    copied = repeated(x, 5, order, inverse(order))
    assert torch.equal(copied, expanded)
    (found,) = torch.autograd.grad((copied * weights).sum(), x)
    assert torch.equal(found, wanted)


def test_experts_take_counts_from_the_host_where_they_are_known() -> None:
    stack = StackedExperts(3, 8, 12, NAMES)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.fill_(0.1)
    counts, given = torch.tensor([2, 0, 3]), torch.ones(5, 8)
    assert reads_in(lambda: stack(given, counts, [2, 0, 3])) == 0
    assert torch.equal(stack(given, counts, [2, 0, 3]), stack(given, counts))
