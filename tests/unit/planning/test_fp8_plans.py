"""Plans of jobs in fp8: what stands against them, their memory and their time."""

from typing import Any

import pytest
from planned_jobs import job_with

from raypp.job.checks import check_training
from raypp.job.job import Job
from raypp.planning.costs import DEVICES, computed_costs, dequantise_seconds
from raypp.planning.forecast import forecast
from raypp.planning.machines import Machines
from raypp.planning.memory import rank_memories
from raypp.planning.search import advice

LARGE = {"num_layers": 8, "hidden_size": 4096, "num_heads": 32, "ffn_size": 14336, "vocab_size": 320}
MATRICES = 4 * 4096**2 + 3 * 4096 * 14336


def job_of(precision: str = "fp8", *, lora: dict[str, Any] | None = None, **sections: Any) -> Job:
    sections["train"] = {"precision": precision, "micro_batch_size": 4, **sections.pop("train", {})}
    model = {**LARGE, "num_kv_heads": 32, **sections.pop("model", {}), **({"lora": lora} if lora else {})}
    return job_with(model=model, data={"seq_len": 4096}, **sections)


ODD = {"model": {"ffn_size": 14340}}
CUT: dict[str, Any] = {"model": {"ffn_size": 14352}, "mesh": {"tp": 2}}
CUT_BASE = {**CUT, "model": {"kind": "phi3", "ffn_size": 14344}, "lora": {"base": "fp8"}, "precision": "bf16"}
EXPERTS = {"kind": "qwen3_moe", "num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 1536}
STACKS = 8 * 3 * 4096 * 1536


@pytest.mark.parametrize(
    ("key", "words", "sections"),
    [
        ("train.precision", "is 14340 × 4096 | make 14340 a multiple of 16", ODD),
        ("train.fp8.bf16_layers", "none of 8 layers in fp8 | at most 3", {"train": {"fp8": {"bf16_layers": 4}}}),
        ("train.precision", "base nf4 has them all | use bf16, or model.lora.base fp8", {"lora": {"base": "nf4"}}),
        ("train.fp8.experts", "the model has no experts | leave it out", {"train": {"fp8": {"experts": True}}}),
        (
            "train.precision",
            "experts.gate_proj is 8 × 1540 × 4096 | make 1540 a multiple of 16, or use train.fp8.experts false",
            {"model": {**EXPERTS, "expert_ffn_size": 1540}, "train": {"fp8": {"experts": True}}},
        ),
        (
            "train.fp8.experts",
            "precision is bf16, model.lora.base nf4 | model.lora.base fp8",
            {"model": EXPERTS, "lora": {"base": "nf4"}, "precision": "bf16", "train": {"fp8": {"experts": True}}},
        ),
        ("model.lora.base", "is 14340 × 4096 | use int8", {**ODD, "lora": {"base": "fp8"}}),
        ("mesh.tp", "multiples of 16, but model.layers.1.mlp.gate_proj.weight is 7176 × 4096 on each | use fewer", CUT),
        ("mesh.tp", "model.layers.0.mlp.down_proj.weight is 4096 × 7172 on each | use fewer", CUT_BASE),
    ],
)
def test_what_stands_against_fp8_is_named_with_its_key(key: str, words: str, sections: dict[str, Any]) -> None:
    fault, fix = words.split(" | ")
    found = {problem.key: problem for problem in check_training(job_of(**sections))}
    assert fault in found[key].fault and fix in found[key].fix
    assert not check_training(job_of()) and not check_training(job_of(lora={"base": "fp8"}))


def test_a_rank_keeps_two_bytes_for_each_weight_in_fp8_unless_weights_are_freed() -> None:
    def weights(precision: str, kind: str = "llama", **mesh: Any) -> list[int]:
        job = job_of(precision, model={"kind": kind}, mesh={"pp": 2, **mesh})
        return [one.weights for one in rank_memories(job, "cuda")]

    more = [fp8 - bf16 for fp8, bf16 in zip(weights("fp8"), weights("bf16"), strict=True)]
    assert more == [2 * 3 * MATRICES] * 2  # of four layers, one is beside an end
    assert weights("fp8", reshard_after_forward=True) == weights("bf16", reshard_after_forward=True)
    for kind, tp in (("llama", 2), ("phi3", 4)):  # phi3's are whole on each rank, not their form
        both = (weights(precision, kind, tp=tp) for precision in ("fp8", "bf16"))
        assert [fp8 - bf16 for fp8, bf16 in zip(*both, strict=True)] == [2 * 3 * MATRICES // tp] * 2
    norms = 2 * 3 * 2 * 4096  # of an own model all of a layer counts
    assert [more - norms for more in weights("fp8", kind="own_models:tiny")] == weights("fp8")


def test_experts_in_fp8_are_kept_by_their_ranks_and_cost_less_time() -> None:
    def job(experts: bool, **mesh: Any) -> Job:
        return job_of(model=EXPERTS, train={"fp8": {"experts": experts}}, mesh={"pp": 2, **mesh})

    def more(**mesh: Any) -> list[int]:
        plain, fp8 = (rank_memories(job(experts, **mesh), "cuda") for experts in (False, True))
        return [two.weights - one.weights for one, two in zip(plain, fp8, strict=True)]

    assert more() == [2 * 3 * STACKS] * 2 and more(fsdp=2, ep=2) == [2 * 3 * STACKS // 2] * 2
    plain, fp8 = (computed_costs(job(experts), DEVICES["h100"]).layer for experts in (False, True))
    assert fp8.forward < plain.forward and fp8.backward < plain.backward
    bases = (job_of(model=EXPERTS, lora={"base": "fp8"}, train={"fp8": {"experts": fp8}}) for fp8 in (False, True))
    unpacked, multiplied = (dequantise_seconds(one, DEVICES["h100"]) for one in bases)
    assert unpacked > 0 == multiplied


def test_products_in_fp8_are_faster_on_cards_that_have_them() -> None:
    def layer(card: str, precision: str, **lora: Any) -> float:
        part = computed_costs(job_of(precision, lora=lora or None), DEVICES[card]).layer
        return part.forward + part.backward

    for card in ("h100", "rtx4090"):
        assert 1.1 < layer(card, "bf16") / layer(card, "fp8") < 1.4
        assert 1.3 < layer(card, "bf16", base="bf16") / layer(card, "bf16", base="fp8") < 1.8
    machines, grouped = Machines.alike(1, 1, None), job_of(model=EXPERTS, mesh={"pp": 1})
    for job, key, cards in (
        (job_of("bf16", mesh={"pp": 1}), "train.precision fp8", ("h100", "rtx4090")),
        (grouped, "train.fp8.experts true", ("h100",)),
    ):
        for card in ("h100", "rtx4090", "a100-80"):
            tips = advice(job, machines, DEVICES[card], forecast(job, machines, DEVICES[card]), kind="cuda")
            assert (f"{key} (changes the numbers)" in dict(tips)) == (card in cards), card
