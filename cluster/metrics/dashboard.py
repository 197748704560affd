"""Prints the Grafana dashboard of runs: `python -m cluster.metrics.dashboard > raypp.json`.

It uses the metric names from raypp's code. Import the file in Grafana (Dashboards, New, Import).
Grafana asks for the Prometheus data source.
"""

from __future__ import annotations

import json
from typing import Any

from raypp.state.run_records import quantities as names
from raypp.state.run_records.quantities import Metric

_HALF, _HEIGHT = 12, 8
_RUN = '{run=~"$run"}'


def panels() -> list[tuple[str, Metric, str, str]]:
    """Title, metric, query and unit of each chart. Queries cover the runs selected at the top."""
    parts = f"sum by (run, part) ({_of(names.STEP_PART_SECONDS)})"
    states = f"{_of(names.STATE)} == 1"
    return [
        ("Loss", names.LOSS, _of(names.LOSS), "none"),
        ("Tokens per second", names.TOKENS_PER_SECOND, _of(names.TOKENS_PER_SECOND), "none"),
        ("Gradient norm, before clipping", names.GRAD_NORM, _of(names.GRAD_NORM), "none"),
        ("Step time", names.STEP_SECONDS, _of(names.STEP_SECONDS), "s"),
        ("Where a step's time goes", names.STEP_PART_SECONDS, parts, "s"),
        ("Steps done", names.STEP, f"{_of(names.STEP)} / {_of(names.STEPS)}", "percentunit"),
        ("Steps since the newest checkpoint", names.STEP, f"{_of(names.STEP)} - {_of(names.CHECKPOINT_STEP)}", "none"),
        ("Living ranks", names.RANKS_ALIVE, _of(names.RANKS_ALIVE), "none"),
        ("Restarts", names.RESTARTS, _of(names.RESTARTS), "none"),
        ("State", names.STATE, states, "none"),
    ]


def dashboard() -> dict[str, Any]:
    """Returns the whole dashboard as Grafana imports it."""
    charts = [_chart(number, *panel) for number, panel in enumerate(panels())]
    runs = f"label_values(ray_{names.STEP.name}, run)"
    variable = {
        "name": "run",
        "type": "query",
        "datasource": _SOURCE,
        "query": runs,
        "definition": runs,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }
    source = {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}
    return {
        "__inputs": [source],
        "uid": "raypp-runs",
        "title": "raypp runs",
        "tags": ["raypp"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": charts,
    }


_SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def _of(metric: Metric) -> str:
    return f"ray_{metric.name}{_RUN}"


def _chart(number: int, title: str, metric: Metric, query: str, unit: str) -> dict[str, Any]:
    extra = "".join(f" {{{{{tag}}}}}" for tag in metric.tags if tag != "run")
    row, column = divmod(number, 2)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": metric.help,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _HALF, "y": row * _HEIGHT, "w": _HALF, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [{"refId": "A", "datasource": _SOURCE, "expr": query, "legendFormat": f"{{{{run}}}}{extra}"}],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))  # noqa: T201
