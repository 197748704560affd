"""torch's private names that raypp uses, under public names. No other file of it uses one.

torch may change a private name in any release. Each entry says what raypp uses the name for and
since which release torch has it; "since 2.4" may be earlier, because older releases were not
checked. Everything here works with torch 2.11 to 2.13; `make test-torch211` checks it with 2.11. If
a new torch breaks a name, fix it here.
`tests/lint/test_torch_private.py` fails if another file uses a private name. Those that only tests
and benchmarks use are in `benchmarks/torch_private.py`.
"""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _add_reduce_grad, _add_unshard_reshard, _ComputationType
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
)
from torch.utils._python_dispatch import TorchDispatchMode

# Programs (pipeline.runtime): torch's passes add gathers, releases and reductions.

LoweredAction = _Action
"""`pipelining.schedules._Action`: one action of a program, which the passes take and return.

Since 2.4; its fields have this order since 2.5.
"""

Computation = _ComputationType
"""`pipelining.schedules._ComputationType`: the kind of an action.

Since 2.4; FULL_BACKWARD and BACKWARD_INPUT since 2.6, REDUCE_GRAD since 2.10.
"""

add_unshard_reshard = _add_unshard_reshard
"""`pipelining.schedules._add_unshard_reshard`: adds UNSHARD and RESHARD to compute actions.

Since 2.5.
"""

add_reduce_grad = _add_reduce_grad
"""`pipelining.schedules._add_reduce_grad`: adds REDUCE_GRAD after a stage's last backward.

Since 2.10.
"""


class ChunkStage(PipelineStage):
    """Runs torch's forward and backward of one microbatch on tensors that a subclass supplies.

    torch's stage fixes all shapes when it is created, and owns the messages between stages. This
    class bypasses both: a subclass overrides `take_activations` and `take_gradients`, and sends the
    contents of `fwd_cache` and `bwd_cache`.

    Private names it overrides or sets:
        `_retrieve_recv_activations`, `_retrieve_recv_grads`: torch takes received tensors there.
            Since 2.4.
        `_stage_meta`: A backward of 2.13 reads the number of the stage's inputs from it. Not in
            2.11.
        `_validate_fwd_input`, `_validate_fwd_outputs`: A forward of 2.11 checks shapes in them. Not
            in 2.13.

    Legend: B rows, T tokens, C hidden size. A `module` that is sharded must itself be FSDP's root.
    `group`: the pipeline's ranks.
    """

    def __init__(
        self, module: nn.Module, index: int, num_stages: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        # A placeholder for both ends disables torch's shape inference.
        placeholder = torch.empty(1, device="meta")
        super().__init__(
            module, index, num_stages, device, input_args=placeholder, output_args=placeholder, group=group
        )
        one = (None,)
        self._stage_meta = SimpleNamespace(inputs=one, outputs=one, input_grads=one, output_grads=one)  # type: ignore[assignment]

    def take_activations(self, microbatch: int) -> Tensor:
        """Returns the input `[B, T, C]`, not on the first stage. Called once per forward."""
        raise NotImplementedError

    def take_gradients(self, microbatch: int) -> Tensor:
        """Returns the output's gradient `[B, T, C]`, not on the last stage; once per backward."""
        raise NotImplementedError

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Runs torch's forward without keyword arguments in the saved inputs. torch 2.11 would
        treat each of them as an input that requires a gradient."""
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        self.fwd_cache[fwd_chunk_id] = (outputs, inputs[:1])
        return output

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor]:
        """Returns the input `[B, T, C]` to torch's forward."""
        return (self.take_activations(fwd_chunk_id),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor]:
        """Returns the output's gradient `[B, T, C]` to torch's backward."""
        return (self.take_gradients(bwd_chunk_id),)

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Does nothing: the subclass checks shapes."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Does nothing: the subclass checks shapes."""


# Parts of tensors (parallel.shard, checkpoint.state).
# `tensor._utils.compute_local_shape_and_global_offset`: the position of this rank's part of a
# DTensor within the whole. At this path since 2.5.


def allocate(module: nn.Module, memory: Callable[[Tensor], Tensor]) -> None:
    """Replaces every parameter and buffer `[...]` of a module by what `memory` returns for it. Uses
    `nn.Module._apply`, which FSDP extends; `nn.Module.to_empty` is made of it. Since 2.4."""
    module._apply(memory)  # type: ignore[no-untyped-call]


def set_local(tensor: Tensor, local: Tensor) -> None:
    """Replaces the local part `[...]` of a DTensor, also by one in host memory. The DTensor keeps
    its device, also for gradients. Sets `DTensor._local_tensor`, as FSDP does. Since 2.4."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def run_step_pre_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Calls what an optimizer calls before it changes the weights, for a change by others. Reads
    `Optimizer._optimizer_step_pre_hooks`. Since 2.4."""
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        hook(optimizer, (), {})


# Weights in host memory (train.optimizer_offload).


@contextlib.contextmanager
def integer_weights() -> Iterator[None]:
    """Lets `fully_shard` take frozen integer parameters while the context is active.
    `fsdp._fully_shard._fsdp_param.nn`: FSDP of torch 2.11 makes every sharded parameter there one
    that requires a gradient, which integers cannot, and corrects that in its next line. Later
    releases make it right, and this changes nothing."""

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    module: Any = _fsdp_param
    module.nn = SimpleNamespace(**{**vars(nn), "Parameter": parameter})
    try:
        yield
    finally:
        module.nn = nn


def _fsdp_groups(module: Any) -> list[Any]:
    """Returns FSDP's records of what one of its modules reduces together."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    return list(groups)


def fsdp_shards(module: Any) -> list[tuple[Any, nn.Parameter, Tensor]]:
    """Returns FSDP's record of each parameter of one FSDP module, the parameter, and its shard.

    The shard `[padded elements]` is what FSDP gathers from. Uses `FSDPModule._get_fsdp_state`,
    `FSDPParamGroup.lazy_init`, which FSDP calls again in its first forward without effect on the
    shards, and `FSDPParam._sharded_param_data`. Since 2.6; several groups of a module since 2.13.
    """
    groups = _fsdp_groups(module)
    for group in groups:
        group.lazy_init()
    return [(one, one.sharded_param, one._sharded_param_data) for group in groups for one in group.fsdp_params]


def gather_from(record: Any, shard: Tensor) -> None:
    """Makes FSDP gather a parameter from another shard `[padded elements]`. It may have the dtype
    that FSDP gathers in; FSDP then casts nothing. `record`: from `fsdp_shards`."""
    record._sharded_param_data = shard


def add_to_sums(module: Any) -> None:
    """Adds the gradients that lie at a module's gathered weights to FSDP's sums, in their dtype.
    FSDP does so at the end of a backward. A separate backward of the weights has no such end, and
    the next one would add to gradients in the dtype of the computation. Uses `FSDPParam`'s
    `accumulate_unsharded_grad_if_needed` and `to_accumulated_grad_if_needed`. Since 2.4."""
    for record in (one for group in _fsdp_groups(module) for one in group.fsdp_params):
        record.accumulate_unsharded_grad_if_needed()  # to the sum, if there is one
        record.to_accumulated_grad_if_needed()  # a sum of its own, if there is none


def take_sums(module: Any) -> list[tuple[Any, str, Tensor]]:
    """Takes away the gradients that FSDP holds for a module and has not reduced, for `put_sums`.
    They are at `FSDPParam.unsharded_param` and `unsharded_accumulated_grad`. Since 2.4."""
    taken = []
    for record in (one for group in _fsdp_groups(module) for one in group.fsdp_params):
        for holder, name in ((record.unsharded_param, "grad"), (record, "unsharded_accumulated_grad")):
            if (gradient := getattr(holder, name)) is not None:
                taken.append((holder, name, gradient))
                setattr(holder, name, None)
    return taken


def put_sums(taken: list[tuple[Any, str, Tensor]]) -> None:
    """Gives back what `take_sums` took; there must be none in its place."""
    for holder, name, gradient in taken:
        setattr(holder, name, gradient)


def end_backward(module: Any) -> None:
    """Lets FSDP reduce the gradients of one of its modules, as at the end of the module's backward.
    Uses `FSDPParamGroup.post_backward`. Since 2.6; several groups of a module since 2.13."""
    for group in reversed(_fsdp_groups(module)):
        group.post_backward()


def sum_shards_in(module: Any, dtype: torch.dtype) -> None:
    """Makes FSDP keep and add up the summed gradients of a module in `dtype`, not in the weights',
    which may have several. The parameters must accept such gradients (`grad_dtype`). Changes
    `FSDPParamGroup._orig_dtype` whenever `_init_mp_dtypes` has set it, which FSDP calls when it
    starts, and which refuses parameters of several dtypes: it sees those of one. Since 2.4; several
    groups of a module since 2.13."""

    def changed(group: Any, begin: Any) -> None:
        records = group.fsdp_params
        dtypes = [one.sharded_param.dtype for one in records if one.sharded_param.requires_grad]
        group.fsdp_params = [one for one in records if one.sharded_param.dtype in dtypes[:1]]
        begin()
        group.fsdp_params = records
        for one in records:
            one.init_dtype_attrs(group.mp_policy)
        if group._orig_dtype is not None:  # something is trained
            group._orig_dtype = dtype

    for group in _fsdp_groups(module):
        group._init_mp_dtypes = partial(changed, group, group._init_mp_dtypes)


# Sums over replicas (parallel.replica_sums).


def take_replica_sum(module: Any) -> dist.ProcessGroup | None:
    """Makes FSDP leave a module's sum over replicas to its hook (`set_all_reduce_hook`).

    Weights and gradients stay replicated along the same axis. Replaces `FSDPParamGroup.mesh_info`
    and, where it is the same, `post_forward_mesh_info`; by the first, FSDP decides whether to sum
    over replicas itself. Since 2.6; several groups of a module since 2.13. Returns the group of the
    replicas; None if the module has none, or no parameters."""
    replicas = None
    for group in _fsdp_groups(module):
        info = group.mesh_info
        if isinstance(info, FSDPMeshInfo) and isinstance(info, DDPMeshInfo):
            replicas = info.replicate_process_group
            group.mesh_info = FSDPMeshInfo(info.mesh, info.shard_mesh_dim)
            if group.post_forward_mesh_info is info:  # FSDP gathers differently where the two differ
                group.post_forward_mesh_info = group.mesh_info
    return replicas


def reduced_together(module: Any) -> list[nn.Parameter]:
    """Returns the parameters whose gradients a module of FSDP reduces as one flat tensor, in order.
    Uses `FSDPParam.sharded_param`. Since 2.6; several groups of a module since 2.13."""
    return [one.sharded_param for group in _fsdp_groups(module) for one in group.fsdp_params]


# Operators (parallel.ring_hops, models.varlen_attention, parallel.apply, train.reduce).

flash_attention_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""torch's attention kernel on CPUs, which also returns the log-sum-exp (lse). Since 2.4."""

flash_attention_for_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Its backward, which takes the lse over all blocks. Since 2.4."""

flash_attention_forward = torch.ops.aten._flash_attention_forward
"""torch's variable-length attention kernel on CUDA, which also returns the lse. Since 2.4.

`varlen_attn` is the public way to it, with a backward of its own. Ring attention needs the lse over
all hops in the backward, and so calls both operators itself.
"""

flash_attention_backward = torch.ops.aten._flash_attention_backward
"""Its backward, which takes the lse over all blocks. Since 2.4; these arguments since 2.7."""

cudnn_attention_forward = torch.ops.aten._cudnn_attention_forward
"""cuDNN's attention kernel on CUDA, also for documents of several lengths. In 2.11 and later."""

cudnn_attention_backward = torch.ops.aten._cudnn_attention_backward
"""Its backward. In 2.11 and later."""

ATTENTION_OPERATORS = (
    "aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention", "aten::_cudnn_attention",
)  # fmt: skip
"""Prefixes of attention operators' names, as selective checkpointing sees them. Since 2.4."""

GROUPED_MM_OPERATOR = "aten::_grouped_mm"
"""The operator of `torch.nn.functional.grouped_mm`, as selective checkpointing sees it.

Since 2.8.
"""

SCALED_MM_OPERATOR = "aten::_scaled_mm_v2"
"""The operator of `torch.nn.functional.scaled_mm`, as selective checkpointing sees it. In 2.11 and
later."""

scaled_grouped_mm = torch._scaled_grouped_mm
"""Multiplies rows in fp8 `[N, K]` by the matrices `[E, K, O]` of their experts, as
`torch.nn.functional.scaled_grouped_mm` does, which has no fake kernel. Since 2.8."""
SCALED_GROUPED_MM_OPERATOR = "aten::_scaled_grouped_mm"
"""Its operator, as selective checkpointing sees it."""

foreach_norm = torch._foreach_norm
"""Returns the norms of many tensors `[...]` at once, each norm `[]`. Since 2.4."""

foreach_copy_ = torch._foreach_copy_
"""Copies many tensors `[...]` to others at once, which may have another dtype. Since 2.1."""

foreach_mul_ = torch._foreach_mul_
"""Multiplies many tensors `[...]` in place at once. Since 2.4."""

# Process groups (train.process_group, train.abort, control.worker).


def backends_on(device: torch.device) -> list[Any]:
    """Returns the backends of all of this process's groups for a device. Callers abort them, and
    ask NCCL's for errors (`get_error`, since 2.6). Uses `distributed_c10d._world.pg_map` and
    `ProcessGroup._get_backend`. Since 2.4."""
    backends = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a group without this device
            backends.append(group._get_backend(device))
    return backends


def set_operation_timeout(backend: Any, timeout: timedelta) -> None:
    """Sets the limit of a group's next operations: `Backend._set_default_timeout`. Since 2.4."""
    backend._set_default_timeout(timeout)


def flight_record() -> str:
    """Returns the record of this process' latest collectives as JSON; "" if torch has none. Uses
    `_C._distributed_c10d._dump_nccl_trace_json`, in builds with NCCL since 2.5, and on CPUs
    `_dump_fr_trace_json`, since 2.8."""
    name = "_dump_nccl_trace_json" if torch.cuda.is_initialized() else "_dump_fr_trace_json"  # type: ignore[no-untyped-call]
    dump = getattr(torch._C._distributed_c10d, name, None)
    return dump(True, False).decode() if dump is not None else ""


def restart_group_names() -> None:
    """Makes the next group get the name "0", as in a new process. Call it while no group exists.
    Sets `distributed_c10d._world.group_count`. A group's name is this count and is part of its keys
    in the store; a join that failed half-way leaves it increased. Since 2.4."""
    dist.distributed_c10d._world.group_count = 0


# A step on a device without kernels, in one process (`measure.fake_device`).

DispatchMode = TorchDispatchMode
"""`utils._python_dispatch.TorchDispatchMode`: sees every operator while it is active. Since 2.4."""

read_scalar = torch.ops.aten._local_scalar_dense.default
"""The operator of `Tensor.item`. Since 2.4."""


def set_allocator(settings: str) -> None:
    """Changes settings of CUDA's allocator, as in PYTORCH_ALLOC_CONF. Since 2.1."""
    torch.cuda.memory._set_allocator_settings(settings)


def inductor_config() -> Any:
    """Returns the settings of torch.compile: `compile_threads` (since 2.0) is how many processes it
    starts, and is read when it first compiles."""
    from torch._inductor import config

    return config


def register_fake_device(name: str, module: Any) -> None:
    """Makes `name` a device of this process, permanently; `module` is its `torch.<name>`. Also
    gives it the process group backend `fake_<name>`, which moves no data. Uses
    `utils.backend_registration._setup_privateuseone_for_python_backend`, since 2.10, and
    `testing._internal.distributed.fake_pg`, since 2.4."""
    from torch.testing._internal.distributed.fake_pg import _create_fake_pg
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(name, module)
    dist.Backend.register_backend(f"fake_{name}", _create_fake_pg, extended_api=True, devices=[name])


def fake_tensors() -> Any:
    """Returns a context in which operators compute shapes and devices only, not values. Operators
    that need a value raise. Uses `_subclasses.fake_tensor.FakeTensorMode`, since 2.4, and lets
    `DeviceMesh._concatenate`, since 2.10, which FSDP calls over tp, compute with values."""
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    mesh: Any = DeviceMesh
    concatenate = getattr(mesh, "_concatenate", None)
    if concatenate is not None and not hasattr(concatenate, "of_values"):

        def with_values(meshes: list[DeviceMesh]) -> DeviceMesh:
            with unset_fake_temporarily():
                joined: DeviceMesh = concatenate(meshes)
            return joined

        with_values.of_values = True  # type: ignore[attr-defined]
        mesh._concatenate = staticmethod(with_values)
    return FakeTensorMode(allow_non_fake_inputs=True)
