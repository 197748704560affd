"""What Prometheus and Grafana's queries show of a run that trains."""

import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from laptop import Laptop, Run, wait_for

from cluster.metrics.dashboard import dashboard
from raypp.control.clusters.local_servers import find_prometheus
from raypp.state.run_records.quantities import (
    AUX_LOSS,
    LOSS_SCALE,
    METRICS,
    MFU,
    OVERFLOWS,
    REPLICA_BYTES,
    TFLOPS,
    WIRE_BYTES,
    Z_LOSS,
)

pytestmark = [pytest.mark.gate, pytest.mark.timeout(400)]
needs_prometheus = pytest.mark.skipif(find_prometheus() is None, reason="install Debian's package `prometheus`")

EMPTY = {
    **dict.fromkeys((AUX_LOSS.name, Z_LOSS.name), "the model has no experts"),
    **dict.fromkeys((MFU.name, TFLOPS.name), "only GPUs have a peak"),
    **dict.fromkeys((LOSS_SCALE.name, OVERFLOWS.name), "only fp16 scales the loss"),
    **dict.fromkeys((WIRE_BYTES.name, REPLICA_BYTES.name), "the run has no replicas"),
}
"""Metrics that this run does not have, and why."""


@pytest.fixture(scope="module")
def run(laptop: Laptop) -> Iterator[Run]:
    """A run that trains until the tests have seen it: Ray exports metrics every 10 s."""
    job = laptop.job("seen", mesh={"pp": 2, "fsdp": 2}, train__steps=100_000, checkpoint__every_steps=50)
    run = laptop.start(job)
    try:
        run.wait_step(51)
        yield run
    finally:
        laptop.raypp("stop", "seen", "--no-save")
        run.wait_end()
        run.wait()


def prometheus(laptop: Laptop) -> str:
    answer = laptop.raypp("local", "status", "--json")
    assert answer.code == 0, answer
    assert answer.json()["prometheus"], "it is installed, but does not run"
    return str(answer.json()["prometheus"])


def ask(url: str, path: str, **parameters: Any) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
        return json.load(answer)["data"]


def series(url: str, query: str) -> list[dict[str, Any]]:
    """Evaluates a query over the last ten minutes, as a chart does."""
    now = time.time()
    return list(ask(url, "query_range", query=query, start=now - 600, end=now, step=5)["result"])


@needs_prometheus
def test_prometheus_has_every_metric_with_its_labels_and_the_numbers_of_the_history(laptop: Laptop, run: Run) -> None:
    url = prometheus(laptop)
    for metric in METRICS:
        selected = f'ray_{metric.name}{{run="seen"}}'
        if metric.name in EMPTY:
            assert not series(url, selected), f"{metric.name} has values, although {EMPTY[metric.name]}"
            continue
        for one in wait_for(lambda query=selected: series(url, query), f"values of {selected}"):
            assert one["metric"]["run"] == "seen"
            assert set(metric.tags) <= one["metric"].keys()
    scraped = {float(value) for one in series(url, 'ray_raypp_loss{run="seen"}') for _, value in one["values"]}
    wait_for(lambda: scraped <= {row["loss"] for row in run.history()}, f"a history with {scraped}")
    without_a_save = 'min_over_time(ray_raypp_step_part_seconds{run="seen",part="save"}[10m]) == 0'
    assert wait_for(lambda: series(url, without_a_save), "a sample of a step that saves nothing")


@needs_prometheus
def test_every_chart_of_the_grafana_dashboard_has_data_and_its_legend_the_labels(laptop: Laptop, run: Run) -> None:
    url = prometheus(laptop)
    document = dashboard()
    (variable,) = document["templating"]["list"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
    assert wait_for(lambda: "seen" in ask(url, f"label/{label}/values", **{"match[]": name}), "the run's name")
    for panel in document["panels"]:
        (target,) = panel["targets"]
        query = target["expr"].replace("$run", "seen")
        found = wait_for(lambda query=query: series(url, query), f"data of the chart {panel['title']}: {query}")
        legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        shown = [tuple(one["metric"].get(label) for label in sorted(legend)) for one in found]
        assert all(map(all, shown)), f"{panel['title']}: the legend asks for {legend}"
        assert len(set(shown)) == len(shown), f"{panel['title']}: two lines with one legend"


@needs_prometheus
def test_the_dashboard_knows_prometheus(laptop: Laptop) -> None:
    assert laptop.dashboard.get_json("/api/prometheus_health")["result"] is True


@needs_prometheus
def test_prometheus_that_was_killed_is_started_again_by_up_and_the_cluster_goes_on(
    laptop: Laptop, run: Run, tmp_path: Path
) -> None:
    url = prometheus(laptop)
    wait_for(lambda: series(url, 'ray_raypp_step{run="seen"}'), "a sample that is stored before it is killed")
    state = laptop.directory / "home/local/state.json"
    killed = psutil.Process(json.loads(state.read_text())["prometheus"]["pid"])
    killed.kill()
    killed.wait(10)
    answer = laptop.raypp("local", "status")
    assert answer.code == 0 and "Prometheus     not running" in answer.out and "prometheus.log" in answer.out
    answer = laptop.raypp("local", "up", environment={"PATH": str(tmp_path)})
    assert answer.code == 0 and "Prometheus     not installed" in answer.out
    answer = laptop.raypp("local", "up")
    assert answer.code == 0 and f"Prometheus     {url}" in answer.out
    assert series(url, 'ray_raypp_step{run="seen"}'), "what was stored before it was killed is gone"
    assert wait_for(lambda: ask(url, "query", query='ray_raypp_step{run="seen"}')["result"], "new values")
