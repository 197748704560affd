"""How many of NCCL's thread blocks carry a message between stages, by the rates of the links."""

from pathlib import Path

import pytest

from raypp.job.load import parse_job
from raypp.planning.decide import ctas_for, decide
from raypp.planning.decision import Facts
from raypp.rank.joining.network import network_gbps

H100, RTX4090 = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"


@pytest.mark.parametrize(("gbps", "ctas"), [(1, 1), (25, 1), (100, 1), (101, 2), (400, 2), (0, 2), (800, 4), (3000, 4)])
def test_a_link_gets_the_thread_blocks_that_its_rate_needs(gbps: float, ctas: int) -> None:
    assert ctas_for(gbps) == ctas


@pytest.mark.parametrize(
    ("gpus", "card", "network", "ctas", "words"),
    [
        ((4,), H100, 0.0, 4, "in a node, has 3,000 Gbit/s"),
        ((4,), RTX4090, 0.0, 2, "in a node, has 120 Gbit/s"),
        ((4,), "a card of next year", 0.0, 2, "in a node, has an unknown rate"),
        ((2, 2), H100, 400.0, 2, "between nodes, has 400 Gbit/s"),
        ((2, 2), H100, 25.0, 1, "between nodes, has 25 Gbit/s"),
        ((2, 2), H100, 0.0, 2, "between nodes, has an unknown rate"),
        ((3, 1), RTX4090, 800.0, 2, "in a node, has 120 Gbit/s"),
    ],
)
def test_the_slowest_boundary_of_all_pipelines_decides_for_all_ranks(
    gpus: tuple[int, ...], card: str, network: float, ctas: int, words: str
) -> None:
    job = parse_job({"name": "blocks", "model": {"num_layers": 4}, "mesh": {"pp": 4}})
    decision = decide(job, Facts("cuda", gpus, (card,), 80 << 30, network_gbps=network))
    assert decision.ctas == ctas and decision.ctas_words.endswith(words)


def test_nothing_is_said_where_no_message_needs_thread_blocks() -> None:
    job = parse_job({"name": "blocks", "model": {"num_layers": 4}, "mesh": {"fsdp": 2}})
    assert not decide(job, Facts("cuda", (2,), (H100,), 80 << 30)).ctas_words
    job = parse_job({"name": "blocks", "model": {"num_layers": 4}, "mesh": {"pp": 2}})
    assert not decide(job, Facts()).ctas_words


def test_the_fastest_port_of_an_hca_that_is_active_counts_before_the_interface(tmp_path: Path) -> None:
    assert (network_gbps(25_000, {}, tmp_path), network_gbps(0, {}, tmp_path)) == (25.0, 0.0)
    for name, state, rate in (
        ("mlx5_0", "4: ACTIVE", "200 Gb/sec (4X HDR)"),
        ("mlx5_1", "1: DOWN", "400 Gb/sec (4X NDR)"),
        ("mlx5_2", "4: ACTIVE", "no rate"),
    ):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    assert network_gbps(25_000, {}, tmp_path) == 200.0
    assert network_gbps(25_000, {"NCCL_IB_DISABLE": "1"}, tmp_path) == 25.0
    assert network_gbps(25_000, {"NCCL_NET": "Socket"}, tmp_path) == 25.0
