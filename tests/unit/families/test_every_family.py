"""Contract tests of every model family. A new family is tested as soon as its file exists."""

import math
from collections import Counter
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small_models import CASES, small_options
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raypp.cli.main import cli
from raypp.errors import JobError
from raypp.job.job import Job
from raypp.job.known_families import FAMILIES
from raypp.job.layer_rules import DeltaRule
from raypp.job.load import parse_job
from raypp.job.models import DecoderOptions
from raypp.planning.flops import attention_flops, flops_per_token, head_flops, layer_flops
from raypp.planning.memory import stage_parameters
from raypp.planning.plan import make_plan
from raypp.planning.sizes import sizes_of, sizes_remark
from raypp.stages.models.documents import PackedDocuments
from raypp.stages.models.initial_values import initial_value
from raypp.stages.models.stage import build_stage, parameter_names
from raypp.state.hf.config import config_from_options, options_from_config
from raypp.state.hf.names import hf_parts, model_tensors, state_names

CUTS = ([5], [2, 3], [1, 3, 1], [1, 1, 1, 1, 1])
every_family = pytest.mark.parametrize("kind", FAMILIES)
every_case = pytest.mark.parametrize("case", CASES)


def stages_of(options: DecoderOptions, cut: list[int]) -> list[nn.Module]:
    spans = [range(a, b) for a, b in pairwise([0, *accumulate(cut)])]
    last = len(cut) - 1
    return [build_stage(options, span, first=stage == 0, last=stage == last) for stage, span in enumerate(spans)]


def job_of(options: DecoderOptions, cut: list[int], **sections: Any) -> Job:
    model = options.model_dump(mode="json", exclude_none=True)
    pipeline = {"layers_per_stage": cut, "microbatches": 8}
    data = {"kind": "synthetic", "seq_len": 24, "document_len": [24, 24]}
    return parse_job(
        {"name": "a", "model": model, "data": data, "mesh": {"pp": len(cut)}, "pipeline": pipeline, **sections}
    )


@every_family
def test_list_kinds_shows_a_family(kind: str) -> None:
    printed = CliRunner().invoke(cli, ["list-kinds", "model.kind"], env={"COLUMNS": "120"}).output
    assert f"{kind} " in printed and FAMILIES[kind].summary in " ".join(printed.split())


@every_family
@every_case
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_stage_has_the_parameters_that_are_declared(kind: str, case: str, cut: list[int]) -> None:
    options = small_options(kind, **{**CASES[case], "num_layers": 5})
    job, first = job_of(options, cut), 0
    for number, stage in enumerate(stages_of(options, cut)):
        built = {name: tuple(tensor.shape) for name, tensor in stage.state_dict().items()}
        layers = range(first, first + cut[number])
        ends = {"first": number == 0, "last": number == len(cut) - 1}
        declared = FAMILIES[kind].stage_weights(options, layers, **ends)
        assert built == {name: weight.shape for name, weight in declared.items()}
        assert stage_parameters(job, number, cut) == sum(parameter.numel() for parameter in stage.parameters())
        first = layers.stop


@every_family
@every_case
def test_the_model_has_the_tensors_that_are_declared_and_tied_ones_once(kind: str, case: str) -> None:
    options = small_options(kind, **CASES[case])
    whole = build_stage(options, range(2), first=True, last=True)
    assert {name: tuple(tensor.shape) for name, tensor in whole.state_dict().items()} == model_tensors(options)
    state = {name for name, _ in whole.named_buffers()}
    assert state_names(options) == state and sorted(model_tensors(options).keys() - state) == parameter_names(options)
    count = sum(parameter.numel() for parameter in whole.parameters())
    assert sizes_of(options).whole == make_plan(job_of(options, [2])).parameters == count
    assert sizes_remark(options) is None


@every_family
def test_experts_are_what_expert_parallel_spreads(kind: str) -> None:
    options = small_options(kind)
    whole = build_stage(options, range(2), first=True, last=True)
    stacked = [parameter.numel() for name, parameter in whole.named_parameters() if ".experts." in name]
    assert sizes_of(options).stage_experts(range(2)) == sum(stacked)
    assert sizes_of(options).layers[-1].sent == (options.experts_per_token if stacked else 0)


def parts(name: str, parameter: torch.Tensor) -> Any:
    return hf_parts(name, parameter.shape)


@every_family
@every_case
def test_flops_are_those_that_torch_counts(kind: str, case: str) -> None:
    """Of all matrix products. torch ignores the causal mask and counts attention twice."""
    rows, tokens = 2, 24
    options = small_options(kind, **CASES[case])
    model = build_stage(options, range(2), first=True, last=True).to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(initial_value(name, tensor.shape, options, 7))
    ids = torch.randint(0, 97, (rows, tokens), generator=torch.Generator().manual_seed(0))
    documents = PackedDocuments.of_rows([[tokens]] * rows, tokens)
    positions = torch.arange(tokens).expand(rows, tokens)
    # torch counts FLOPs on every device only for the attention kernel of plain products.
    counted = {torch.ops.raypp.attention_by_products: of_products}
    with FlopCounterMode(display=False, custom_mapping=counted) as forward, sdpa_kernel(SDPBackend.MATH):
        logits = model(ids, positions, documents)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    matrices, attention = of_operators(forward)
    back, _ = of_operators(backward)
    per_layer, rules = layer_flops(options, sizes_of(options), tokens), [options.state_rule(i) for i in range(2)]
    mixing = attention_flops(options, tokens)
    assert matrices == rows * tokens * (2 * (per_layer - mixing) + head_flops(options))
    # torch counts masked scores, but no triangular systems.
    scores = rules.count(None) * 2 * tokens * options.num_heads * options.dim_per_head
    delta = [rule for rule in rules if isinstance(rule, DeltaRule)]
    systems = sum(rule.value_heads * tokens * (rule.key_dim + rule.value_dim) for rule in delta)
    assert attention == rows * tokens * (2 * mixing + scores - systems)
    assert back == 2 * matrices
    assert flops_per_token(job_of(options, [2])) == 3 * (matrices / (rows * tokens) + 2 * mixing)


def of_products(q_QHD: list[int], k_NKD: list[int], *_: Any, **__: Any) -> int:
    """Returns the FLOPs of raypp's own attention, with a soft cap for example."""
    return 2 * 2 * math.prod(q_QHD) * k_NKD[0]


def of_operators(counter: FlopCounterMode) -> tuple[int, int]:
    """Returns the FLOPs of products with weights, and of attention, batched over heads."""
    found: Counter[bool] = Counter()
    for operator, flops in counter.get_flop_counts()["Global"].items():
        found["bmm" in str(operator) or "by_products" in str(operator)] += flops
    return found[False], found[True]


@every_family
@every_case
def test_what_writes_into_the_residual_stream_begins_smaller_in_a_deeper_model(kind: str, case: str) -> None:
    shallow = small_options(kind, **{**CASES[case], "num_layers": 2})
    deep = shallow.model_copy(update={"num_layers": 8})
    declared = FAMILIES[kind].model_weights(shallow)
    for name, weight in declared.items():
        shape = torch.Size(weight.shape)
        factor = 2 if weight.residual else 1
        assert torch.equal(initial_value(name, shape, shallow, 0), initial_value(name, shape, deep, 0) * factor), name
        assert not weight.residual or weight.shape[-1 if weight.transposed else -2] == shallow.hidden_size
    inner = [weight for weight in declared.values() if weight.residual]
    assert len(inner) >= 2 * shallow.num_layers, "attention and feed-forward block both write into it"


@every_family
@every_case
def test_config_json_gives_back_the_section_it_was_written_from(kind: str, case: str) -> None:
    options = small_options(kind, **CASES[case])
    config = config_from_options(options, dtype="float32", context=64, eos_id=1)
    given = DecoderOptions(from_hf="there")
    resolved = {"from_hf": "there", "head_dim": options.dim_per_head, "num_kv_heads": options.kv_heads}
    found = options_from_config(config, given, "config.json")
    assert type(found) is type(options)
    # A block that the family lacks has no key.
    sizes = FAMILIES[kind].hf.sizes
    skipped = {"ffn_size"} if "ffn_size" not in sizes or len(set(sizes.values())) < len(sizes) else set()
    assert found.model_dump(exclude=skipped) == {**options.model_dump(exclude=skipped), **resolved}


@every_family
def test_what_a_family_does_not_compute_is_refused_by_name(kind: str) -> None:
    form = FAMILIES[kind].hf
    config = config_from_options(small_options(kind), dtype="float32", context=64, eos_id=1)
    for key in form.exact:
        with pytest.raises(JobError, match=rf'there: {key} (is "another"|.another. is not supported)'):
            options_from_config({**config, key: "another"}, DecoderOptions(from_hf="there"), "there")
    for key in form.sizes.values():
        with pytest.raises(JobError, match=rf"there: {key} is missing"):
            options_from_config({k: v for k, v in config.items() if k != key}, DecoderOptions(from_hf="there"), "there")
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(JobError, match=f"there: {key} .*yarn.* is not supported"):
            changed = {**config, "rope_scaling": None, key: {"rope_type": "yarn"}}
            options_from_config(changed, DecoderOptions(from_hf="there"), "there")


def test_names_and_model_types_are_taken_once() -> None:
    assert len({family.hf.model_type for family in FAMILIES.values()}) == len(FAMILIES)
    assert list(FAMILIES) == [family.name for family in FAMILIES.values()]
