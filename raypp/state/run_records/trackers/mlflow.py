"""MLflow: a run on a tracking server, or in a database file."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raypp.errors import Problem
from raypp.kinds import TrackerKind
from raypp.state.run_records.tracked import TrackedRun

KIND = TrackerKind(
    "mlflow",
    "an MLflow tracking server, or a file of SQLite",
    position=30,
    library="mlflow",
    install="raypp[mlflow]",
    settings={
        "uri": "tracking server, or sqlite:////absolute/path.db (offline); default: MLFLOW_TRACKING_URI",
        "experiment": "experiment; default: MLFLOW_EXPERIMENT_NAME, then raypp",
    },
    variables=(
        "MLFLOW_TRACKING_URI",
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_EXPERIMENT_NAME",
    ),
    checks=True,
)

_TAG = "raypp.id"
_STATES = {"SUCCEEDED": "FINISHED", "STOPPED": "KILLED", "FAILED": "FAILED"}
_PARAMS_AT_ONCE = 100
_LONGEST_PARAM = 500
_PASSWORD = re.compile(r"://[^/@]*@")


def check(options: Mapping[str, str], environment: Mapping[str, str]) -> list[Problem]:
    """Returns a problem if nothing says where the server is."""
    if options.get("uri") or environment.get("MLFLOW_TRACKING_URI"):
        return []
    example = "{kind: mlflow, options: {uri: 'sqlite:////home/me/mlflow.db'}}"
    fix = f"set MLFLOW_TRACKING_URI to your server; offline, use a file: {example}"
    return [Problem("", "mlflow has no place for its runs: MLFLOW_TRACKING_URI is not set", fix)]


class MLflow:
    """One run of MLflow, found by a tag. It cannot take back what it has."""

    def __init__(self, run: TrackedRun) -> None:
        import os

        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        uri = run.options.get("uri") or os.environ.get("MLFLOW_TRACKING_URI", "")
        for problem in check(run.options, os.environ):
            raise ValueError(str(problem))
        self._metric = Metric
        self._client = client = MlflowClient(tracking_uri=uri)
        name = run.options.get("experiment") or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "raypp"
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name, _artifacts(uri))
        runs = client.search_runs([experiment_id], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            client.update_run(self._id, status="RUNNING")
        else:
            tags = {_TAG: run.id, "raypp.url": run.url}
            self._id = client.create_run(experiment_id, tags=tags, run_name=run.name).info.run_id
            # Parameters cannot change: they are those of the first submission.
            params = [Param(key, value[:_LONGEST_PARAM]) for key, value in _flat(run.config, "")]
            for first in range(0, len(params), _PARAMS_AT_ONCE):
                client.log_batch(self._id, params=params[first : first + _PARAMS_AT_ONCE])
        losses = client.get_metric_history(self._id, "loss") if runs else []
        self.newest = max((metric.step for metric in losses), default=0)
        self.where = f"{_PASSWORD.sub('://', uri)}, experiment {name}, run {self._id}"

    def values(self, step: int, time: float, values: Mapping[str, float]) -> None:
        metrics = [self._metric(name, value, int(time * 1000), step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def text(self, step: int, time: float, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/step-{step:08d}.md")

    def rewind(self, step: int) -> bool:
        return False

    def close(self, state: str) -> None:
        if state in _STATES:
            self._client.set_terminated(self._id, _STATES[state])


open_tracker = MLflow


def _artifacts(uri: str) -> str | None:
    """Returns the place of the artifacts of a database file: beside it. None: the server's."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts").as_uri()


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, str(value)
