"""When FSDP sums the gradients of a stage, and frees its gathered weights, within a backward."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from raypp.torch_private import add_to_sums, end_backward


def reduce_within_backward(stage: FSDPModule, root: Tensor, *, last: bool = True, frees: bool = True) -> None:
    """Makes the backward from `root` start the sum of each block once its gradients are done.

    Sums that cannot start within this backward start after it, as usual. After the last backward of
    a step the caller must end the reduction (`PipelineStage.perform_reduce_grad`): only that makes
    the device's compute wait for the sums, so on a GPU they overlap with all that is computed in
    between.

    Args:
        root: The stage's output `[B, T, C]`, or the scalar loss: where the backward starts.
        last: Whether it is the stage's last backward in the step. Before that, FSDP adds up what is
            summed over shards, and sums over replicas are left to the last one.
        frees: Whether each block frees its gathered weights after its use.
    """

    # Set the flags in the backward: torch's pipelining has just cleared them.
    root.register_hook(lambda _: _reduce_from_here(stage, last=last, frees=frees))  # type: ignore[no-untyped-call]


def _reduce_from_here(stage: FSDPModule, *, last: bool, frees: bool) -> None:
    stage.set_reshard_after_backward(frees)
    stage.set_requires_gradient_sync(True)
    stage.set_requires_all_reduce(last)


def reduce_now(stage: FSDPModule, *, last: bool) -> None:
    """Sums the gradients that lie at a stage's gathered weights, after a backward of weights alone.
    `last`: as for `reduce_within_backward`."""
    _reduce_from_here(stage, last=last, frees=False)
    for module in reversed(list(stage.modules())):  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            add_to_sums(module)  # those of norms may be from the other half of the backward
            end_backward(module)


def free_within_backward(stage: FSDPModule, root: Tensor) -> None:
    """Makes the backward from `root` free the gathered weights of each block after its use."""
    root.register_hook(lambda _: stage.set_reshard_after_backward(True))  # type: ignore[no-untyped-call]
