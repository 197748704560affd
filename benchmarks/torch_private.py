"""torch's private names that only benchmarks and tests use; raypp's own are in
`raypp.torch_private`, which says how such names are kept."""

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

copy_to = torch.ops.aten._to_copy.default
"""The operator of `Tensor.to`. Since 2.4."""


def schema_of(operator: Any) -> Any:
    """Returns an operator's schema: which arguments it writes, which of its results are views.
    `OpOverload._schema`, since 1.10."""
    return operator._schema


def order_of_streams() -> Any:
    """Returns torch's record of which work of which stream is ordered before which, by events.
    `cuda._sanitizer.StreamSynchronizations`, which needs no device. Since 1.13."""
    from torch.cuda._sanitizer import StreamSynchronizations

    return StreamSynchronizations()


def fsspec_writer() -> type[Any]:
    """Returns torch's own writer of checkpoints to object stores, for comparison; needs fsspec.
    `checkpoint._fsspec_filesystem.FsspecWriter`: torch has no public name for it. Since 2.4."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter


def kernels_on_cuda(function: Callable[..., Any], inputs: Sequence[Tensor], fake: Any) -> list[list[int]]:
    """Returns the bytes that each kernel moves which torch.compile would generate for an H100.

    Products and attention are not generated. Changes torch in this process: torch for CPUs cannot
    trace for CUDA, but inductor can plan kernels for a graph that was traced on the CPU. Uses
    `_inductor`'s lowering and scheduler as of 2.13. `inputs`: fake tensors of `fake`, on the CPU.
    Returns the kernels of the forward, and those of the backward if an input has one."""
    from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.compile_fx import _recursive_post_grad_passes
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.utils._pytree import tree_leaves, tree_map

    h100 = SimpleNamespace(name="H100", gcnArchName="", major=9, minor=0, warp_size=32)
    h100.multi_processor_count, h100.regs_per_multiprocessor = 132, 65536
    places: tuple[Any, ...] = torch.cuda, CudaInterface, scheduler
    for place in places[:2]:
        place.is_available, place.get_device_properties = lambda: True, lambda device=None: h100
    places[0].get_device_capability = lambda device=None: (9, 0)
    places[0].current_device = lambda: 0
    places[0].get_rng_state, places[0].set_rng_state = lambda *_: torch.zeros(1), lambda *_: None
    places[1].get_compute_capability = lambda device=None: 90
    places[2].has_triton = lambda: True
    sizes: list[list[int]] = []

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    def plan(traced: torch.fx.GraphModule, given: Sequence[Any]) -> Any:
        run = make_boxed_func(copy.deepcopy(traced).forward)
        with V.set_fake_mode(fake):
            _recursive_post_grad_passes(traced)
        for node in traced.graph.nodes:
            node.meta["val"] = tree_map(moved, node.meta.get("val"))
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        given = [moved(value) for value in given]
        lowered = GraphLowering(traced, example_inputs=given)
        handlers = (V.set_graph_handler(lowered), V.set_debug_handler(DebugContext()), V.set_extern_kernel_nodes([]))
        with V.set_fake_mode(fake), handlers[0], handlers[1], handlers[2]:
            lowered.run(*given)
            lowered.init_wrapper_code()
            lowered._update_scheduler()
            others = (scheduler.ExternKernelSchedulerNode, scheduler.NopKernelSchedulerNode)
            own = [node for node in lowered.scheduler.nodes if not isinstance(node, others)]
            sizes.append([int(node.get_read_write_buffers_sizes()) for node in own])
        return run

    compiled = aot_function(
        function, plan, plan, partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table()
    )
    is_compiling, torch.compiler.is_compiling = torch.compiler.is_compiling, lambda: True
    outputs = [one for one in tree_leaves(compiled(*inputs)) if one.requires_grad]
    torch.compiler.is_compiling = is_compiling
    if outputs:
        gradients = [torch.ones_like(one) for one in outputs]
        torch.autograd.grad(outputs, [one for one in inputs if one.requires_grad], gradients)
    return sizes
