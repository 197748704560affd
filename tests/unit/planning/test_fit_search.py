"""Every change that is proposed fits when it is planned again, and the fastest comes first."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_jobs import job_with, typed

from raypp.job.checks import check_training
from raypp.job.job import Job
from raypp.job.load import parse_job
from raypp.planning.check import check_plan
from raypp.planning.costs import DEVICES, computed_costs, device_named
from raypp.planning.decide import decide_reduction
from raypp.planning.fit_search import Fitting, changes_that_fit, set_words
from raypp.planning.forecast import forecast
from raypp.planning.host_memory import offload_problems
from raypp.planning.levers import LEVERS, meshes
from raypp.planning.machines import Machines
from raypp.planning.memory import peak_memory
from raypp.planning.plan import Grounds, make_plan
from raypp.planning.search import changed_job

GIB = 1024**3
LARGE = {"hidden_size": 2048, "num_heads": 16, "num_kv_heads": 4, "ffn_size": 5632, "num_layers": 8}
LLAMA_8B = {
    "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 14336, "vocab_size": 128256,
}  # fmt: skip


def eight_b(precision: str = "bf16", microbatches: int = 16, **mesh: int) -> Job:
    return parse_job(
        {
            "name": "eight-b",
            "model": LLAMA_8B,
            "data": {"kind": "synthetic", "seq_len": 4096},
            "mesh": mesh,
            "pipeline": {"microbatches": microbatches},
            "train": {"micro_batch_size": 1, "precision": precision},
        }
    )


def ask(job: Job, card: str, gbps: float = 1.0, gib: float = 0, patience_s: float = 120) -> Fitting:
    device = device_named(card)
    if gib:
        device = replace(device, memory=int(gib * GIB))
    machines = Machines.alike(job.mesh.world, 1, gbps)
    return changes_that_fit(job, machines, device, keep=100, patience_s=patience_s)


def assert_all_hold(job: Job, found: Fitting, card: str, gbps: float = 1.0) -> None:
    """Types the fastest proposals and a sample of the others, plans them again, and compares."""
    assert len({set_words(one) for one in found.same}) == len(found.same)
    assert [one.forecast.step_s for one in found.same] == sorted(one.forecast.step_s for one in found.same)
    sampled = (*found.same[:5], *found.same[5 :: 1 + len(found.same) // 8])
    for one in (*sampled, *found.apart, *([found.more] if found.more else [])):
        changed = typed(job, set_words(one))
        assert check_plan(changed) == []
        grounds = Grounds(machines=Machines.alike(changed.mesh.world, 1, gbps), device=device_named(card).name)
        plan = make_plan(changed, grounds=grounds)
        assert max(rank.total for rank in plan.memory) <= found.capacity
        assert one.peak <= found.capacity
        if plan.predictions[0].device_memory == found.capacity:
            assert plan.predictions[0].peak_memory == one.peak
            assert plan.predictions[0].step_s == pytest.approx(one.forecast.step_s)
        assert plan.tokens_per_step == make_plan(job).tokens_per_step, "the batch must stay"
        assert changed.model.model_copy(update={"lora": None}) == job.model
        assert (changed.mesh.world == job.mesh.world) == (one is not found.more)
        if one in found.same:
            assert changed.data == job.data and changed.model == job.model


@pytest.mark.parametrize(
    ("sections", "gib"),
    [
        pytest.param(
            {"train": {"micro_batch_size": 8}, "pipeline": {"schedule": "gpipe", "microbatches": 2}},
            8,
            marks=pytest.mark.slow,
        ),
        ({"mesh": {"pp": 1}, "train": {"micro_batch_size": 4}}, 7),
        pytest.param(
            {"mesh": {"pp": 1}, "data": {"seq_len": 8192}, "train": {"micro_batch_size": 4}}, 7, marks=pytest.mark.slow
        ),
        pytest.param({"pipeline": {"lookahead": 4}, "train": {"micro_batch_size": 8}}, 8, marks=pytest.mark.slow),
    ],
)
def test_every_change_that_is_proposed_makes_the_job_fit(sections: dict[str, dict[str, object]], gib: float) -> None:
    job = job_with(model=LARGE, **{"data": {"seq_len": 2048}, **sections})
    found = ask(job, "rtx4090", gib=gib)
    assert found.now is None and found.need == peak_memory(job) > gib * GIB
    assert (found.same or found.more) and not found.out_of_time
    assert_all_hold(job, found, "rtx4090")


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from([{"pp": 1}, {"pp": 2}, {"pp": 1, "fsdp": 2}]),
    st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["llama", "qwen3_moe"]),
    st.floats(0.3, 1.2),
)
def test_what_is_proposed_for_any_job_fits_when_planned_again(
    mesh: dict[str, int], schedule: str, rows: int, family: str, share: float
) -> None:
    stages = {"stages_per_rank": 2} if schedule == "interleaved_1f1b" else {}
    job = job_with(
        model={**LARGE, "kind": family},
        data={"seq_len": 1024},
        mesh=mesh,
        pipeline={"schedule": schedule, "microbatches": 4, **stages},
        train={"micro_batch_size": rows},
    )
    if check_plan(job):
        return
    found = ask(job, "rtx4090", gib=share * peak_memory(job) / GIB)
    assert (found.now is not None) == (share >= 1 or found.need <= found.capacity)
    assert_all_hold(job, found, "rtx4090")
    if found.nearest is not None:
        assert found.nearest.peak > found.capacity and not found.same


@pytest.mark.parametrize(("layers", "gib"), [(4, 3.4), pytest.param(8, 5.5, marks=pytest.mark.slow)])
def test_the_first_is_the_fastest_of_all_that_fit_and_need_every_lever_they_use(layers: int, gib: float) -> None:
    """All combinations are planned here, one by one."""
    job = job_with(model={**LARGE, "num_layers": layers}, data={"seq_len": 1024}, train={"micro_batch_size": 2})
    device, machines = replace(DEVICES["rtx4090"], memory=int(gib * GIB)), Machines.alike(2, 1, 1.0)
    keeping = [lever for lever in LEVERS if not lever.apart]
    times: list[float] = []
    for shape in meshes(job, 2):
        shaped = changed_job(job, shape)
        if shaped is None:
            continue
        fitting: dict[tuple[int, ...], float] = {}
        levels = [[{}, *lever.levels(shaped)] for lever in keeping]
        for point in product(*(range(len(one)) for one in levels)):
            changes = {k: v for of, level in zip(levels, point, strict=True) for k, v in of[level].items()}
            one = changed_job(shaped, changes)
            if one is None or check_plan(one):
                continue
            decided, _ = decide_reduction(one, machines, device.memory, "cuda")
            if peak_memory(decided, "cuda") > device.memory:
                continue
            cast = forecast(one, machines, computed_costs(one, device), device.memory, kind="cuda")
            assert cast.peak_memory <= device.memory
            fitting[point] = cast.step_s
        for point, step_s in fitting.items():
            smaller = (o for o in fitting if o != point and all(a <= b for a, b in zip(o, point, strict=True)))
            if not any(smaller):
                times.append(step_s)
    found = changes_that_fit(job, machines, device, keep=1000, patience_s=120)
    assert found.now is None and len(times) > 3
    assert [one.forecast.step_s for one in found.same] == pytest.approx(sorted(times))


def test_an_8b_in_full_on_four_rtx4090_takes_less_state_on_the_card() -> None:
    job = eight_b(pp=4)
    found = ask(job, "rtx4090")
    assert found.now is None, "16 bytes a parameter are 30 GiB on each of four ranks"
    trains = [one.job.train for one in found.same]
    assert {("bf16", "fp32", True), ("bf16_pure", "8bit", False)} == {
        (train.precision, train.optimizer.state, train.optimizer.offload) for train in trains
    }
    assert_all_hold(job, found, "rtx4090")


@pytest.mark.gate
def test_an_8b_in_full_on_two_rtx4090_needs_more_devices() -> None:
    job = eight_b(pp=2)
    found = ask(job, "rtx4090")
    assert found.now is None and not found.same, "weights and summed gradients are 22 GiB on each of two ranks"
    assert found.nearest is not None and found.nearest.peak > 24 * GIB
    assert found.nearest.peak < found.need
    assert found.more is not None and found.more.job.mesh.world == 4
    assert_all_hold(job, found, "rtx4090")


@pytest.mark.gate
def test_offloading_is_not_proposed_beyond_the_memory_of_the_nodes() -> None:
    job = job_with(model=LARGE, data={"seq_len": 1024}, train={"micro_batch_size": 1, "precision": "bf16"})
    device = replace(device_named("rtx4090"), memory=int(5 * GIB))
    offload = {"train.optimizer.offload": True}
    for gib in (0, 1, 64):  # 0: not known
        machines = Machines.alike(2, 1, 1.0)
        machines = replace(machines, nodes=tuple(replace(node, memory=gib * GIB) for node in machines.nodes))
        found = changes_that_fit(job, machines, device, keep=100, patience_s=120)
        assert found.same and (offload in [one.changes for one in found.same]) == (gib != 1)
        nodes = {node.name: node.memory for node in machines.nodes}
        assert not any(offload_problems(one.job, nodes, "cuda") for one in found.same)
    # What a cluster's nodes have free, where nothing else is known of them.
    found = changes_that_fit(job, Machines.alike(2, 1, 1.0), device, keep=100, patience_s=120, host={"a": 1, "b": GIB})
    assert found.same and not any("train.optimizer.offload" in one.changes for one in found.same)


@pytest.mark.parametrize("kind", ["sgd", pytest.param("muon", marks=pytest.mark.slow)])
def test_an_optimizer_without_8_bit_state_is_not_offered_one(kind: str) -> None:
    job = job_with(model=LARGE, data={"seq_len": 1024}, train={"micro_batch_size": 2, "optimizer": {"kind": kind}})
    found = ask(job, "rtx4090", gib=0.6 * peak_memory(job, "cuda") / GIB)
    assert found.same and all(one.job.train.optimizer.state == "fp32" for one in found.same)
    assert all(check_training(one.job) == [] for one in (*found.same, *found.apart))


@pytest.mark.gate
def test_on_a_cpu_nothing_is_offloaded() -> None:
    job = job_with(model=LARGE, data={"seq_len": 1024}, train={"micro_batch_size": 2})
    found = ask(job, "cpu", gib=0.6 * peak_memory(job, "cpu") / GIB)
    offloads = [one for one in found.same if one.job.train.activation_checkpointing == "offload"]
    assert found.same and not offloads and not any(one.job.train.optimizer.offload for one in found.same)


@pytest.mark.parametrize(
    ("card", "world", "fits_now", "fits_changed"),
    [
        pytest.param("RTX 3090", 4, False, True, marks=pytest.mark.slow),
        pytest.param("RTX 3090", 2, False, False, marks=pytest.mark.slow),
        pytest.param("a100-40", 4, False, True, marks=pytest.mark.slow),
        ("a100", 4, True, True),
        pytest.param("a100-40", 6, False, True, marks=pytest.mark.slow),
        ("NVIDIA H100", 4, True, True),
    ],
)
def test_cards_by_name(card: str, world: int, fits_now: bool, fits_changed: bool) -> None:
    job = eight_b(pp=world, microbatches=world)
    found = ask(job, card)
    assert found.capacity == device_named(card).memory
    assert (found.now is not None) == fits_now
    assert (found.now is not None or bool(found.same)) == fits_changed
    assert_all_hold(job, found, card)


def test_something_that_can_never_fit() -> None:
    found = ask(eight_b(pp=1, microbatches=1), "rtx4090", gib=1)
    assert not found.same and not found.apart and found.more is None  # not even its adapters
    assert found.nearest is not None and found.nearest.peak > GIB


@pytest.mark.gate
def test_shorter_sequences_are_offered_apart() -> None:
    job = job_with(model=LARGE, data={"seq_len": 16384}, mesh={"pp": 2}, train={"micro_batch_size": 1})
    found = ask(job, "rtx4090", gib=5)
    assert all("data.seq_len" not in one.changes for one in found.same)
    (shorter,) = (one for one in found.apart if "data.seq_len" in one.changes)
    assert (
        shorter.job.model.lora is None
        and shorter.job.data.seq_len < 16384
        and "cuts longer documents" in shorter.costs[0]
    )
    assert_all_hold(job, found, "rtx4090")


@pytest.mark.gate
def test_adapters_are_offered_apart_and_never_with_full_training() -> None:
    job = eight_b(pp=2, microbatches=4)
    found = ask(job, "rtx4090")
    assert not found.same, "full training does not fit on two cards"
    (adapters,) = (one for one in found.apart if one.job.model.lora is not None)
    assert "trains adapters only" in adapters.costs[0] and adapters.job.data == job.data
    assert_all_hold(job, found, "rtx4090")


def test_a_search_without_time_says_so() -> None:
    found = ask(eight_b(pp=4), "rtx4090", patience_s=0)
    assert found.out_of_time and not found.same


@pytest.mark.parametrize("lever", LEVERS, ids=lambda lever: lever.name)
def test_a_lever_changes_valid_keys_and_each_level_saves_more(lever: object) -> None:
    assert lever in LEVERS
    jobs = [
        job_with(model=LARGE, pipeline={"schedule": "gpipe", "lookahead": 0}, mesh={"fsdp": 2, "pp": 2}),
        job_with(model=LARGE, pipeline={"lookahead": 4}, data={"seq_len": 8192}, train={"precision": "bf16"}),
        job_with(model={**LARGE, "lora": {"rank": 8}}, train={"precision": "bf16"}),
    ]
    applied = 0
    for job in jobs:
        before = peak_memory(job, "cuda")
        for changes in lever.levels(job):  # type: ignore[attr-defined]
            one = changed_job(job, changes)
            assert one is not None and one != job
            after = peak_memory(one, "cuda")
            assert after < before, f"{changes} saves nothing"
            before, applied = after, applied + 1
    assert applied


def test_the_depth_of_the_warm_up_is_the_best_that_fits_for_plan_and_search() -> None:
    """An 8 B on four cards and 1 Gbit/s: without a limit the plan would take a deeper one."""
    sections = {"lora": {"rank": 16}}
    job = parse_job(
        {
            "name": "look",
            "model": LLAMA_8B | sections,
            "data": {"kind": "synthetic", "seq_len": 16384},
            "mesh": {"pp": 4},
            "pipeline": {"microbatches": 32},
            "train": {"micro_batch_size": 1, "precision": "bf16", "activation_checkpointing": "full"},
        }
    )
    card, machines = device_named("rtx4090"), Machines.alike(4, 1, 1.0)
    (prediction,) = make_plan(job, grounds=Grounds(machines=machines, device="rtx4090")).predictions
    free = forecast(job, machines, computed_costs(job, card), 0, kind="cuda")
    assert 0 < prediction.lookahead < free.lookahead and free.peak_memory > card.memory
    assert prediction.peak_memory <= prediction.device_memory == card.memory
    deeper = changed_job(job, {"pipeline.lookahead": prediction.lookahead + 1})
    assert deeper is not None and peak_memory(deeper, "cuda") > card.memory
    found = changes_that_fit(job, machines, card)
    assert found.now is not None and found.now.forecast.lookahead == prediction.lookahead
    assert found.need == prediction.peak_memory
