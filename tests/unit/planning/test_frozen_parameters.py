"""Plans of jobs that train adapters: frozen weights have no gradients and no optimizer state."""

from typing import Any

import pytest
import torch
from planned_jobs import job_with

from raypp.job.job import Job
from raypp.job.lora import lowest_trained
from raypp.job.optimizer_groups import trained_names
from raypp.planning.costs import DEVICES, computed_costs
from raypp.planning.flops import backward_factor, flops_per_token, weight_share
from raypp.planning.forecast import forecast
from raypp.planning.machines import Machines
from raypp.planning.plan import make_plan
from raypp.planning.resolve import resolve_pipeline
from raypp.planning.sizes import sizes_of
from raypp.stages.models.stage import build_stage

BF16 = {"precision": "bf16"}


def lora_job(kind: str = "llama", lora: dict[str, Any] | None = None, **sections: Any) -> Job:
    return job_with(model={"kind": kind, "lora": lora or {"rank": 8}}, **{"train": BF16, **sections})


@pytest.mark.parametrize(
    ("kind", "tied", "also"),
    [("llama", True, ["lm_head"]), ("llama", False, ["embed_tokens", "norms"]), ("qwen3_moe", False, ["lm_head"])],
)
def test_sizes_are_those_of_the_model_that_is_built(kind: str, tied: bool, also: list[str]) -> None:
    lora = {"rank": 8, "also_train": also}
    options = job_with(model={"kind": kind, "tie_embeddings": tied, "lora": lora}, train=BF16).model
    sizes = sizes_of(options)
    for layers, first, last in ((range(3), True, False), (range(3, 8), False, True), (range(8), True, True)):
        stage = build_stage(options, layers, first=first, last=last)
        trained = {name: p for name, p in stage.named_parameters() if p.requires_grad}
        assert sizes.stage_parameters(layers, first=first, last=last) == sum(map(torch.numel, stage.parameters()))
        assert sizes.stage_trained(layers, first=first, last=last)[0] == sum(map(torch.numel, trained.values()))
        assert all(p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16) for p in stage.parameters())
    assert max(layer.largest for layer in sizes.layers) == max(
        trained[name].numel() for name in trained if "lora" in name
    )
    assert sorted(trained_names(options)) == sorted(trained)


@pytest.mark.parametrize("base", ["bf16", "int8"])
def test_what_trains_beside_adapters_counts_as_trained_and_moves_the_lowest_backward(base: str) -> None:
    def job(*also: str) -> Job:
        lora = {"rank": 8, "base": base, "targets": ["layers.7.mlp.down_proj"], "also_train": also}
        return lora_job(lora=lora, pipeline={"layers_per_stage": [4, 4]})

    adapters, matrix = make_plan(job()).memory, job().model.vocab_size * job().model.hidden_size
    for part, rank, lowest in (("lm_head", 1, 7), ("embed_tokens", 0, 0)):
        more = make_plan(job(part)).memory
        assert more[rank].optimizer - adapters[rank].optimizer == 8 * matrix
        assert more[rank].weights - adapters[rank].weights == (4 + 2 - 2) * matrix, "a master and its copy"
        assert resolve_pipeline(job(part)).trained == (rank == 0, True)
        assert lowest_trained(job(part).model) == lowest


def test_memory_is_that_of_the_frozen_weights_and_of_the_adapters_state() -> None:
    full, adapters = (make_plan(job) for job in (job_with(train=BF16), lora_job()))
    for rank in (0, 1):
        before, after = full.memory[rank], adapters.memory[rank]
        assert after.weights < 0.6 * before.weights and after.optimizer < 0.1 * before.optimizer
        assert after.total < before.total
    wide = make_plan(lora_job(lora={"rank": 8, "base": "fp32"}))
    stage = sizes_of(lora_job().model)
    trained = stage.stage_trained(range(8), first=True, last=True)[0]
    assert sum(m.weights for m in wide.memory) == (4 + 2) * stage.whole
    assert sum(m.weights for m in adapters.memory) == 2 * (stage.whole - trained) + (4 + 2) * trained
    assert sum(m.optimizer for m in adapters.memory) == 8 * trained
    assert adapters.host.state == 12 * max(stage.stage_trained(r, first=False, last=False)[0] for r in _cut())


def _cut() -> tuple[range, ...]:
    return resolve_pipeline(lora_job()).layers_of_stage


def test_layers_below_all_adapters_count_as_forwards_in_the_cut_and_in_the_step() -> None:
    upper = {"targets": ["layers.6.self_attn.q_proj", "layers.7.mlp.up_proj"]}
    ends = {"input_weight": "auto", "output_weight": "auto"}
    job = lora_job(lora=upper, pipeline={"microbatches": 8, **ends})
    assert (lowest_trained(job.model), lowest_trained(lora_job().model), lowest_trained(job_with().model)) == (6, 0, 0)
    cut, even = (resolve_pipeline(one).cut for one in (job, lora_job(pipeline={"microbatches": 8, **ends})))
    assert cut[0] > even[0], "the lower stage has forwards only, so it gets more of them"
    costs = computed_costs(job, DEVICES["h100"])
    machines = Machines.alike(2, 1, None)
    given = {"microbatches": 8, "layers_per_stage": [4, 4]}
    own, all_trained = (
        forecast(lora_job(lora=lora, pipeline=given), machines, costs).stage_s for lora in (upper, {"rank": 8})
    )
    assert own[0] == pytest.approx(8 * (4 * costs.layer.forward + costs.first.forward))
    saved = 8 * 2 * costs.layer.backward  # layers 4 and 5
    assert all_trained[1] - own[1] == pytest.approx(saved)


def test_a_stage_below_all_adapters_keeps_no_activations() -> None:
    job = lora_job(lora={"targets": ["layers.7.self_attn.q_proj"]}, pipeline={"layers_per_stage": [4, 4]})
    pipeline = resolve_pipeline(job)
    assert pipeline.trained == (False, True) and all(action.kind == "F" for action in pipeline.program[0])
    below, above = make_plan(job).memory
    assert below.activations == below.gradients == below.optimizer == 0 < above.activations


def test_a_backward_computes_gradients_of_inputs_only() -> None:
    full, adapters = job_with(), lora_job()
    assert backward_factor(full) == 2 and 1 < backward_factor(adapters) < 1.3
    assert weight_share(full) == 0.5 and 0 < weight_share(adapters) < 0.1
    assert 0.66 < flops_per_token(adapters) / flops_per_token(full) < 0.78
