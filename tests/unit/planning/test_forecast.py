"""Forecasts of a step on given machines: times, bottleneck, advice, search."""

import json
from dataclasses import replace

import pytest
from planned_jobs import job_with

from raypp.errors import JobError, ResourcesError
from raypp.job.load import parse_job
from raypp.planning.costs import DEVICES, Costs, Part, computed_costs, context_bytes
from raypp.planning.flops import attention_flops
from raypp.planning.forecast import forecast
from raypp.planning.geometry import Mesh
from raypp.planning.machines import INSIDE_GBPS, Link, Machines, Node, message_bytes, read_machines
from raypp.planning.measured_costs import read_costs, write_costs
from raypp.planning.memory import stage_parameters
from raypp.planning.plan import Grounds, predict
from raypp.planning.resolve import resolve_pipeline
from raypp.planning.search import advice, search
from raypp.planning.sizes import sizes_of

UNIT = Costs(Part(1.0, 2.0), Part(0.0, 0.0), Part(0.0, 0.0))


def pipeline(**settings):
    return job_with(model={"num_layers": 4}, pipeline={"microbatches": 8, "layers_per_stage": [2, 2], **settings})


def test_a_step_over_free_links_is_the_textbooks():
    found = forecast(pipeline(lookahead=0), Machines.alike(2, 1, None), UNIT)
    # (m + P - 1) microbatches of 2 layers, each forward and backward
    assert found.step_s == pytest.approx((8 + 1) * 2 * 3)
    assert found.bubble == pytest.approx(1 / 9)
    assert found.links == ()


def test_a_message_takes_its_bytes_over_the_rate_and_the_latency():
    job = pipeline(lookahead=0)
    rate = message_bytes(job) * 8 / 1e9
    found = forecast(job, Machines((Node("a", 1), Node("b", 1)), Link(rate, latency_s=0.25)), UNIT)
    (use,) = found.links
    assert use.message_s == pytest.approx(1.25)
    assert use.nodes == ("a", "b")
    assert use.busy == pytest.approx(8 / found.step_s)
    assert use.exposed_s == pytest.approx(found.step_s - 54)


def test_pipelines_that_leave_a_node_together_share_its_cable():
    job = job_with(
        model={"num_layers": 4}, mesh={"pp": 2, "fsdp": 2}, pipeline={"microbatches": 4, "layers_per_stage": [2, 2]}
    )
    one = forecast(job, Machines.alike(4, 2, 1.0), UNIT).links[0].message_s
    alone = forecast(pipeline(microbatches=4), Machines.alike(2, 1, 1.0), UNIT).links[0].message_s
    assert one == pytest.approx(2 * alone)


def test_ranks_on_one_node_do_not_use_the_cable():
    assert forecast(pipeline(), Machines.alike(2, 2, 0.001), UNIT).links == ()


def test_sharded_weights_over_a_cable_are_gathered_and_reduced_once_a_step():
    job = job_with(mesh={"pp": 1, "fsdp": 2}, pipeline={"microbatches": 4})
    slow = forecast(job, Machines.alike(2, 1, 1.0), UNIT)
    assert slow.parts["unshard"] > 0 and slow.parts["reduce"] == pytest.approx(slow.parts["unshard"])  # both fp32
    again = job_with(mesh={"pp": 1, "fsdp": 2, "reshard_after_forward": True}, pipeline={"microbatches": 4})
    assert forecast(again, Machines.alike(2, 1, 1.0), UNIT).parts["unshard"] == pytest.approx(8 * slow.parts["unshard"])
    split = job_with(
        mesh={"pp": 1, "fsdp": 2, "reshard_after_forward": True},
        pipeline={"microbatches": 4, "schedule": "interleaved_zero_bubble", "stages_per_rank": 2},
    )
    parts = forecast(split, Machines.alike(2, 1, 1.0), UNIT).parts
    assert parts["unshard"] == pytest.approx(12 * slow.parts["unshard"])


EXPERTS = {"kind": "qwen3_moe", "num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 128, "num_layers": 4}


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_experts_are_gathered_and_reduced_over_every_ep_th_rank(ep):
    """Two nodes have four ranks each; of these, up to four are in rings of their own."""
    job = job_with(model=EXPERTS, mesh={"pp": 1, "fsdp": 8, "ep": ep})
    whole, experts = stage_parameters(job, 0, [4]), sizes_of(job.model).stage_experts(range(4))
    parts = forecast(job, Machines.alike(8, 4, 1.0), UNIT).parts
    over_the_cable = (whole - experts) * 7 / 8 + (
        experts * 7 / 8 if ep == 1 else experts * (1 / ep - 1 / 8) * min(ep, 4)
    )
    assert parts["unshard"] == parts["reduce"] == pytest.approx(4 * over_the_cable * 8e-9)


def test_tokens_travel_within_the_ranks_of_their_experts():
    for ep, crosses in ((4, False), (8, True)):
        job = job_with(model=EXPERTS, mesh={"pp": 1, "fsdp": 8, "ep": ep})
        slow, fast = (forecast(job, Machines.alike(8, 4, gbps), UNIT).parts["pipeline"] for gbps in (0.01, 1e6))
        assert (slow > fast) == crosses


def test_auto_looks_ahead_where_the_link_is_slow_and_only_there():
    job = pipeline(lookahead="auto")
    rate = message_bytes(job) * 8 / 1e9 / 2  # a message takes as long as a stage's forward
    slow = forecast(job, Machines.alike(2, 1, rate), UNIT)
    fast = forecast(job, Machines.alike(2, 1, 1e6), UNIT)
    classic = forecast(pipeline(lookahead=0), Machines.alike(2, 1, rate), UNIT)
    assert (slow.lookahead, fast.lookahead) == (1, 0)
    assert slow.step_s < 0.85 * classic.step_s
    assert ("pipeline.lookahead auto", pytest.approx(1 - slow.step_s / classic.step_s)) in advice(
        pipeline(lookahead=0), Machines.alike(2, 1, rate), UNIT, classic
    )


def test_the_bottleneck_is_named():
    job = pipeline(lookahead=0)
    rate = message_bytes(job) * 8 / 1e9 / 20
    assert forecast(job, Machines.alike(2, 1, rate), UNIT).bottleneck.startswith("links: ")
    many = pipeline(lookahead=0, microbatches=64)
    assert forecast(many, Machines.alike(2, 1, None), UNIT).bottleneck.startswith("compute: ")
    few = pipeline(lookahead=0, microbatches=2)
    assert "fill and drain" in forecast(few, Machines.alike(2, 1, None), UNIT).bottleneck


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(ResourcesError, match="2 ranks do not fit on 1 device"):
        forecast(pipeline(), Machines((Node("a", 1),)), UNIT)


def test_the_pipeline_runs_through_the_nodes_in_order():
    machines = Machines((Node("a", 2), Node("b", 2)))
    mesh = Mesh.of(job_with(mesh={"pp": 2, "fsdp": 2}).mesh)
    assert [node.name for node in machines.seats(mesh)] == ["a", "a", "b", "b"]


# The search.


def test_the_search_keeps_the_batch_and_finds_the_cable():
    job = job_with(model={"num_layers": 4}, mesh={"pp": 1, "fsdp": 4}, pipeline={"microbatches": 8})
    costs = computed_costs(job, DEVICES["cpu"])
    batch = job.mesh.replicas * job.pipeline.microbatches * job.train.micro_batch_size
    found = search(job, Machines.alike(4, 2, 0.01), costs)
    for one in found.best:
        assert one.job.mesh.replicas * one.job.pipeline.microbatches * one.job.train.micro_batch_size == batch
        assert one.job.mesh.world == 4
    times = [one.forecast.step_s for one in found.best]
    assert times == sorted(times)
    # Over 10 Mbit/s, a mesh whose pipeline crosses the nodes beats every mesh that reduces
    # gradients across them.
    assert found.best[0].job.mesh.pp >= 2
    assert times[0] <= forecast(job, Machines.alike(4, 2, 0.01), costs).step_s


def test_a_slower_node_gets_fewer_layers():
    job = job_with(model={"num_layers": 12}, mesh={"pp": 2}, pipeline={"microbatches": 8, "schedule": "1f1b"})
    machines = Machines((Node("fast", 1, 1.0), Node("slow", 1, 0.5)))
    best = search(job, machines, UNIT).best[0]
    assert best.job.mesh.pp == 2
    cut = best.job.pipeline.layers_per_stage
    assert cut is not None and sum(cut[0::2]) == 8 and sum(cut[1::2]) == 4  # a loop: even stages on the fast one


def test_what_does_not_fit_is_left_out_and_when_nothing_fits_that_is_said():
    job = job_with(mesh={"pp": 2}, pipeline={"microbatches": 8})
    costs = computed_costs(job, DEVICES["cpu"])
    with pytest.raises(ResourcesError, match="need more memory than a device has"):
        search(job, Machines.alike(2, 1, 1.0), costs, device_memory=1024)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_other_jobs_are_planned_for_the_same_kind_of_device(kind):
    """A process on a GPU takes a few hundred MB more."""
    job, machines, memory = pipeline(lookahead=0), Machines.alike(2, 1, 0.001), 300_000_000
    now = forecast(job, machines, UNIT, memory, kind=kind)
    assert (now.peak_memory < memory) == (kind == "cpu")
    found = dict(advice(job, machines, UNIT, now, memory, kind))
    assert ("pipeline.wire.compression bf16 (changes the numbers)" in found) == (kind == "cpu")
    if kind == "cuda":
        with pytest.raises(ResourcesError, match="need more memory"):
            search(job, machines, UNIT, device_memory=memory, kind=kind)
        return
    best = search(job, machines, UNIT, device_memory=memory, kind=kind).best[0]
    assert best.forecast == forecast(best.job, machines, UNIT, memory, kind=kind)


def test_the_advice_of_a_plan_is_that_of_its_device():
    """Quantising on a core takes longer than it saves on this link; a GPU would gain 4 %."""
    job = job_with(mesh={"pp": 1, "dp_replicate": 2}, pipeline={"microbatches": 1})
    (found,) = predict(job, resolve_pipeline(job), Grounds(device="cpu", link_gbps=1.0, per_node=1))
    assert found.advice == ()


# The files.


def test_links_as_the_doctor_writes_them(tmp_path):
    path = tmp_path / "links.json"
    devices = [
        {"node": "a", "kind": "cpu"},
        {"node": "a", "kind": "cpu"},
        {"node": "b", "kind": "cpu", "flops_rel": 0.5},
    ]
    links = [
        {"from": "a", "to": "b", "gbps": 0.9, "latency_ms": 0.2},
        {"from": "b", "to": "a", "gbps": 0.5, "latency_ms": 0.2},
        {"from": "a", "to": "a", "gbps": 20.0},
    ]
    path.write_text(json.dumps({"nodes": ["a", "b"], "devices": devices, "links": links, "measured": "today"}))
    machines = read_machines(path)
    assert machines.nodes == (Node("a", 2), Node("b", 1, 0.5))
    assert machines.between("b", "a") == Link(0.5, 0.0002)
    assert [machines.between(node, node) for node in ("a", "b")] == [Link(20.0), Link(INSIDE_GBPS)]
    assert machines.times(2).link == Link(0.5, 0.0002), "the slowest of the links between nodes"
    assert machines.measured and "today" in machines.source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ('{"nodes": []}', "has no nodes"),
        ('{"nodes": ["a"], "links": [{"from": "a", "to": "c", "gbps": 1}]}', "names 'c' in links"),
        ('{"nodes": ["a", "b"], "links": [{"from": "a", "to": "b", "gbps": 0}]}', "no rate"),
    ],
)
def test_a_file_that_describes_no_machines_is_refused(tmp_path, text, said):
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(JobError, match=said):
        read_machines(path)


def test_costs_are_read_back_and_hold_for_one_model_only(tmp_path):
    path = tmp_path / "costs.json"
    job = pipeline()
    write_costs(
        path, Costs(Part(0.25, 0.5), Part(0.0, 0.125), Part(1.0, 2.0), 1e-9, 0.5), job, "a core", "fp32", "today"
    )
    found = read_costs(path, job)
    assert (found.layer, found.last, found.optimizer_s, found.measured) == (Part(0.25, 0.5), Part(1.0, 2.0), 1e-9, True)
    more_layers = job_with(model={"num_layers": 9}, mesh={"pp": 3})
    assert read_costs(path, more_layers).layer == found.layer
    with pytest.raises(JobError, match=r"another job: model.hidden_size differ"):
        read_costs(path, job_with(model={"num_layers": 4, "hidden_size": 512}))
    with pytest.raises(JobError, match="does not exist"):
        read_costs(tmp_path / "none.json", job)


def test_costs_of_a_gpu_are_planned_as_a_gpus(tmp_path):
    path, job = tmp_path / "costs.json", pipeline()
    assert job.resources.device == "auto"
    for kind in ("cuda", "cpu"):
        write_costs(path, replace(UNIT, kind=kind), job, "a device", "fp32", "today")
        assert Grounds(costs=read_costs(path, job)).devices_for(job) == [DEVICES[kind]]


def test_costs_have_the_precision_that_auto_was_on_the_measured_card(tmp_path):
    path, auto = tmp_path / "costs.json", job_with(train={"precision": "auto"})
    write_costs(path, replace(UNIT, kind="cuda"), auto, "a T4", "fp16", "today")
    assert read_costs(path, auto).layer == read_costs(path, job_with(train={"precision": "fp16"})).layer == UNIT.layer
    with pytest.raises(JobError, match=r"another job: train.precision differ"):
        read_costs(path, job_with(train={"precision": "bf16"}))
    path.write_text(path.read_text().replace("fp16", "fp15"))
    with pytest.raises(JobError, match="precision fp15 is unknown"):
        read_costs(path, auto)


def test_backwards_in_halves_cost_what_the_halves_take():
    job = job_with(mesh={"pp": 2}, pipeline={"microbatches": 4, "schedule": "zbv", "stages_per_rank": 2})
    whole, apart = (forecast(job, Machines.alike(2, 1, None), replace(UNIT, weight_share=w)) for w in (0.5, 0.75))
    assert apart.step_s > whole.step_s


def test_experts_cost_a_wait_where_they_are_spread_and_more_products_where_torch_has_no_kernel() -> None:
    card = replace(DEVICES["h100"], groups=False)

    def layer(device: str, tokens: int, **mesh: int) -> Part:
        model = {**EXPERTS, "hidden_size": 1024, "num_experts": 64, "expert_ffn_size": 512}
        train = {"precision": "bf16", "micro_batch_size": 1}
        job = {"name": "a", "model": model, "data": {"seq_len": tokens}, "train": train, "mesh": mesh}
        return computed_costs(parse_job(job), card if device == "slow" else DEVICES[device]).layer

    few, spread = (layer("h100", 512, fsdp=2, ep=ep) for ep in (1, 2))
    assert few.forward < spread.forward and few.backward == spread.backward
    many, slow = (layer(device, 1 << 15) for device in ("h100", "slow"))
    assert slow.forward > many.forward and slow.backward > many.backward
    assert layer("slow", 512) == layer("h100", 512)  # the host launches as much


@pytest.mark.parametrize(("style", "parts", "attention"), [("ring", 2, 2 * 2 * 32), ("ulysses", 1, (4 + 2) * 32)])
def test_cp_sends_states_of_delta_rules_and_keys_of_attention(style, parts, attention):
    kinds = ["linear_attention", "full_attention"]
    model = {
        "kind": "qwen3_5", "num_layers": 2, "layer_types": kinds, "num_kv_heads": 2, "head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    }  # fmt: skip
    job = job_with(model=model, mesh={"pp": 1, "cp": 2, "cp_style": style}, train={"micro_batch_size": 3})
    state, last = 4 * 8 * (8 + 16), 3 * (2 * 2 * 8 + 4 * 16)
    assert context_bytes(job) == 3 * 4 * (parts * (state + last) + 128 * attention) / 2


def test_layers_without_a_window_count_their_own_heads():
    own = {"kind": "gemma4", "num_layers": 2, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    narrow, wide = (job_with(model={**own, "full_head_dim": width}, mesh={"pp": 1}).model for width in (16, 48))
    assert attention_flops(wide, 256) == attention_flops(narrow, 256) * (1 + 3) / 2
