"""The Grafana dashboard queries metrics that exist."""

import json
import re

import yaml
from test_launcher_file import _ROOT

from raypp.state.run_records.quantities import METRICS


def test_every_query_names_metrics_that_the_controller_sets_and_tags_they_carry() -> None:
    from cluster.metrics.dashboard import dashboard, panels

    known = {f"ray_{metric.name}": set(metric.tags) for metric in METRICS}
    for _, metric, query, _ in panels():
        asked = re.findall(r"ray_\w+", query)
        assert asked
        assert set(asked) <= known.keys()
        assert f"ray_{metric.name}" in asked
    document = json.loads(json.dumps(dashboard()))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in document["panels"]]
    assert len(set(places)) == len(places)
    for panel in document["panels"]:
        (target,) = panel["targets"]
        metric = next(name for name in known if target["expr"].count(name))
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known[metric] | {"part", "state", "run"}


def test_prometheus_file_is_yaml_that_finds_the_nodes_by_the_heads_list() -> None:
    document = yaml.safe_load((_ROOT / "cluster" / "metrics" / "prometheus.yml").read_text())
    (scrape,) = document["scrape_configs"]
    assert scrape["file_sd_configs"][0]["files"][0].endswith("prom_metrics_service_discovery.json")
