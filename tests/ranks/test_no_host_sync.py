"""From its first forward to its update, a step makes the host wait once: for the sums."""

import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_in_living
from small_models import small_options
from torch import Tensor
from training import document as small
from training import thinned

from benchmarks.torch_private import copy_to
from raypp.control.report.reporter import _Trail
from raypp.job.load import parse_job
from raypp.rank.step.collate import StageBatch
from raypp.rank.step.evaluate import ForwardRunner
from raypp.rank.step.step import ReadStep, StepRunner
from raypp.records import Requests
from raypp.stages.models.loss import token_loss_sum
from raypp.stages.models.moe import StackedExperts
from raypp.stages.parallel.shard import local_part
from raypp.stages.pipeline.agreement import StepPlan, padded_length
from raypp.stages.pipeline.device_clock import device_marks
from raypp.tools.fake_device import Event, HostWaitsError, fake_runner, run_fake_step
from raypp.torch_private import DispatchMode, read_scalar

RECOMPUTE = ("none", "full")
PP_FSDP = {"pp": 2, "fsdp": 2}


def document(
    layers: int,
    mesh: dict[str, Any],
    pipeline: dict[str, Any],
    *,
    tied: bool = False,
    lora: dict[str, Any] | None = None,
    **train: Any,
) -> dict[str, Any]:
    model = {
        "hidden_size": 64, "head_dim": 16, "ffn_size": 128, "vocab_size": 320, "tie_embeddings": tied, "lora": lora,
    }  # fmt: skip
    return small(layers=layers, model=model, pipeline={"microbatches": 2, **pipeline}, train=train, **mesh)


def sharded(**settings: Any) -> dict[str, Any]:
    return document(2, {"fsdp": 2}, {}, **settings)


def of_family(kind: str, recompute: str = "none", **model: Any) -> dict[str, Any]:
    options = small_options(kind, **model).model_dump(mode="json", exclude_none=True)
    return {**sharded(activation_checkpointing=recompute), "model": options}


class NoWaiting(DispatchMode):
    """Raises on copies between host and device that wait, and says where any operator failed.

    Attributes:
        action: What is being run; set by the user.
        reductions: The number of reduce-scatters that began in each action.
    """

    def __init__(self) -> None:
        super().__init__()
        self.action = ""
        self.reductions: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.reductions[self.action] += "reduce_scatter" in func.name()
        if func is read_scalar and args[0].device.type == "cpu":
            return 1  # such as an optimizer's step counter: nothing is read from the device
        try:
            if func is copy_to:
                self._check(args[0].device, kwargs.get("device"), kwargs.get("non_blocking"))
            if func is torch.ops.aten.copy_.default:
                asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking")
                self._check(args[1].device, args[0].device, asynchronous)
            return func(*args, **kwargs)
        except Exception:
            # In the recomputation of a backward, autograd's thread would end the process instead of
            # raising this.
            traceback.print_stack(file=sys.stderr)
            raise

    def _check(self, source: torch.device, to: torch.device | None, asynchronous: bool | None) -> None:
        if to is not None and source.type != to.type and not asynchronous:
            raise HostWaitsError(f"a copy from {source.type} to {to.type} waits for the device")


Prepare = Callable[[StepRunner], None]


def run_step(
    rank: int, world: int, port: int, job_document: dict[str, Any], of_rank: int, prepare: Prepare = lambda _: None
) -> dict[str, Any]:
    """Runs a step and an evaluation of one rank of the job's mesh, and raises where the host waits.

    Returns:
        `updated`: the number of parameters that were; `reductions`: how many reduce-scatters began
        in each action.
    """
    waits = NoWaiting()

    def mark(action: str) -> None:
        waits.action = action

    job = parse_job(job_document).for_device("cpu")
    with fake_runner(job, of_rank, mark) as (runner, microbatches):
        assert any(len(row.documents) > 1 for rows in microbatches for row in rows), "no packed row"
        lengths = [padded_length(max(len(row.tokens) for row in rows), parts=job.mesh.cp) for rows in microbatches]
        read = ReadStep(microbatches, StepPlan(tuple(lengths), 100, Requests()))
        batches = runner.batches(read, 1)  # waiting is allowed here
        prepare(runner)
        with waits:
            run_fake_step(runner, read, batches)
            evaluate(runner, read, batches)
        parameters = [p for module in runner.built.modules for p in module.parameters() if p.requires_grad]
        kept = torch.device("cpu") if job.train.optimizer.offload else runner.device
        updated = sum(
            local_part(runner.optimizer.state[parameter]["exp_avg"]).device == kept for parameter in parameters
        )
    return {"updated": updated, "reductions": dict(+waits.reductions)}


@torch.no_grad()
def evaluate(runner: StepRunner, read: ReadStep, batches: list[StageBatch]) -> None:
    ForwardRunner(runner, token_loss_sum)._runtime.run(
        runner.job.train.micro_batch_size,
        runner.own_lengths(read),
        [batch.tokens_BT for batch in batches],
        [{**batch.stage_arguments(), "labelled_BT": None} for batch in batches],
        [batch.labels_BT for batch in batches],
    )


SMALL: dict[str, Any] = {"optimizer": {"state": "8bit"}, "precision": "bf16_pure"}
# Each case is a job and the rank that is run.
CASES = {
    "bf16_pure": (sharded(precision="bf16_pure"), 1),
    "8bit": (sharded(optimizer={"state": "8bit"}), 1),
    "bf16_pure, 8bit": (sharded(**SMALL), 0),
    "bf16_pure, 8bit, offloaded": (
        sharded(
            precision="bf16_pure", optimizer={"state": "8bit", "offload": True}, activation_checkpointing="offload"
        ),
        1,
    ),
    "lora": (sharded(lora={"rank": 4, "base": "bf16"}, precision="bf16"), 1),
    "lora, dropout": (sharded(lora={"rank": 4, "dropout": 0.1}, precision="bf16"), 1),
    "lora, bf16_pure": (document(2, PP_FSDP, {}, lora={"rank": 4, "base": "bf16"}, precision="bf16_pure"), 3),
    "qlora": (
        sharded(
            lora={"rank": 4, "base": "nf4"},
            precision="bf16",
            optimizer={"offload": True},
            activation_checkpointing="full",
        ),
        1,
    ),
    "qlora, int8": (sharded(lora={"rank": 4, "base": "int8"}, **SMALL), 0),
    "one stage": (sharded(), 1),
    "bf16": (document(2, {}, {}, precision="bf16"), 0),
    "selective": (document(2, PP_FSDP, {"lookahead": 2}, activation_checkpointing="selective"), 0),
    "full, tied": (document(2, PP_FSDP, {}, activation_checkpointing="full", tied=True), 3),
    "replicated, weights freed": (
        document(2, {"dp_replicate": 2, "fsdp": 2, "reshard_after_forward": True}, {"schedule": "gpipe"}),
        3,
    ),
    "int8 sums": (document(2, {"dp_replicate": 2, "fsdp": 2}, {}, sync={"kind": "int8"}), 3),
    "held sums": (document(2, {"pp": 2, "dp_replicate": 2, "fsdp": 2}, {}, sync={"kind": "int8"}), 5),
    "ulysses": (document(2, {"cp": 2, "cp_style": "ulysses"}, {}), 1),
    "interleaved": (document(4, PP_FSDP, {"schedule": "interleaved_1f1b", "stages_per_rank": 2}), 2),
    "split": (document(4, PP_FSDP, {"schedule": "zbv", "stages_per_rank": 2}), 0),
    # Norms over all heads, windows; norms and matrices with biases; part of a head is rotated.
    "olmo3": (of_family("olmo3", sliding_window=9), 1),
    "starcoder2": (of_family("starcoder2", "full", sliding_window=9), 1),
    "stablelm": (of_family("stablelm"), 1),
    "offloaded": (sharded(optimizer={"offload": True}, activation_checkpointing="offload"), 1),
    "bf16, offloaded": (
        document(
            4,
            PP_FSDP,
            {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
            precision="bf16",
            optimizer={"offload": True},
            activation_checkpointing="offload",
        ),
        2,
    ),
}


def run_until_the_device_stands(rank: int, world: int, port: int, at: str) -> tuple[str, str]:
    """Runs a step whose device goes no further than a mark; returns its host's mark, and where its
    reporter says that it is."""
    trail, reported = _Trail(), ["load"]

    def phase(name: str, action: str, reached: Callable[[], bool]) -> None:
        trail.add(f"{name} {action}", reached, reported[-1])
        reported.append(f"{name} {action}")
        Event.stands = Event.stands or action == at

    def prepare(runner: StepRunner) -> None:
        runner.built.runtime.mark = device_marks(phase, "step", runner.device)

    try:
        run_step(rank, world, port, document(4, PP_FSDP, {"microbatches": 4}), 3, prepare)
    finally:
        Event.stands = False
    return reported[reported.index("step sum")], trail.look()[0]


@pytest.mark.parametrize("at", ["1F1 waits", "1F1", "1B2", "sends", "tie"])
def test_where_a_device_stands_is_reported_though_its_host_has_queued_the_step(at: str) -> None:
    (found,) = run_in_living(1, run_until_the_device_stands, run_until_the_device_stands, at)
    assert found == ("step sum", f"step {at}" if at != "tie" else "")


QUICK = ["bf16_pure, 8bit, offloaded", "full, tied", "split", "held sums"]
GATE = ["qlora", "ulysses", "interleaved", "int8 sums"]
REDUCTIONS: dict[str, dict[str, int]] = {
    "bf16": {},
    "interleaved": {"1B1": 1, "3B1": 2},
    "bf16, offloaded": {"1B1": 1, "3B1": 2},
    "full, tied": {"1B1": 2},
    "selective": {"0B1": 2},
    # The stage's other weights are frozen.
    **{name: {"0B1": 2} for name in ("lora", "lora, dropout", "qlora", "qlora, int8")},
    "lora, bf16_pure": {"1B1": 1},
    # Sums over replicas of the block, and of the end of the model, begin when the last gradient has
    # left.
    "held sums": {"sends": 2},
}
"""How many begin in each action. In other cases: each block, and the stage's other weights."""


@pytest.mark.parametrize("name", thinned(CASES, QUICK, GATE))
def test_nothing_waits_and_gradients_are_reduced_within_the_last_backward_of_a_stage(name: str) -> None:
    (found,) = run_in_living(1, run_step, run_step, *CASES[name])
    assert found["updated"] >= 10
    if name == "split":
        assert found["reductions"].keys() == {"0REDUCE_GRAD", "3REDUCE_GRAD"}, "after both halves of a backward"
    else:
        assert found["reductions"] == REDUCTIONS.get(name, {"0B1": 3})


def run_experts(rank: int, world: int, port: int, recompute: str, lora: dict[str, Any] | None) -> dict[str, Any]:
    """Runs a step of a model whose experts are all on this rank, by the grouped kernel."""
    # The kernel is chosen on CUDA only. This device stands for it.
    sys.modules[StackedExperts.__module__].can_group = lambda rows, gate: True  # type: ignore[attr-defined]
    job = sharded(precision="bf16", activation_checkpointing=recompute)
    job["model"] |= {"kind": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 32}
    job["model"]["lora"] = lora
    del job["model"]["ffn_size"]
    return run_step(rank, world, port, job, 1)


@pytest.mark.gate
def test_experts_never_wait_for_the_device_unless_they_are_spread_over_ranks() -> None:
    cases = [*((recompute, None) for recompute in RECOMPUTE), ("full", {"rank": 8, "base": "int8"})]
    for recompute, lora in cases:
        (found,) = run_in_living(1, run_step, run_experts, recompute, lora)
        assert found["reductions"] == {"0B1": 2 if lora else 3}, (recompute, lora)


def plant(what: Callable[[Tensor], Any]) -> Prepare:
    """Makes the first layer do something with its input before it computes."""

    def prepare(runner: StepRunner) -> None:
        layer = next(iter(runner.built.modules[0].get_submodule("model.layers").children()))
        layer.register_forward_pre_hook(lambda module, given: (what(given[0]), None)[1])

    return prepare


PLANTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "_local_scalar_dense"),
    "tolist": (lambda x: x.sum().tolist(), "_local_scalar_dense"),
    "truth": (lambda x: bool((x > 0).all()), "_local_scalar_dense"),
    "to the host": (lambda x: x.cpu(), "waits for the device"),
    "from the host": (lambda x: torch.ones(3).to(x.device), "waits for the device"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "mask": (lambda x: x[x > 0], "nonzero"),
    "bincount": (lambda x: torch.bincount(x.flatten().long()), "bincount"),
    "repeat_interleave": (lambda x: x.repeat_interleave(x[0, :, 0].long(), 1), "repeat_interleave"),
    "wrong device": (lambda x: x + torch.ones(x.shape[-1]), "device"),
}


def messages_of_plants(rank: int, world: int, port: int) -> dict[str, str]:
    """Returns what each planted wait raises; "" if nothing is raised."""
    found = dict.fromkeys(PLANTS, "")
    for name, (what, _) in PLANTS.items():
        try:
            run_step(rank, world, port, *CASES["one stage"], plant(what))
        except Exception as error:  # noqa: BLE001 - torch raises many types; the message is compared
            found[name] = "".join(traceback.format_exception(error))
    return found


def test_each_kind_of_waiting_is_found_where_it_is_planted() -> None:
    (found,) = run_in_living(1, run_step, messages_of_plants)
    missed = [name for name, (_, words) in PLANTS.items() if words not in found[name]]
    assert not missed
