"""What a script or a notebook calls: `raypp.load_job`, `raypp.submit`, `raypp.run`; a run."""

import html
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raypp.api.checked_job import checked, load_checked_job
from raypp.api.run_control import RunControl
from raypp.api.submission import enqueue, prepare, start
from raypp.control.clusters import known_runs
from raypp.control.queue import client
from raypp.control.queue.line import Priority
from raypp.control.queue.ticket import place_in_words, place_of
from raypp.job.job import Job
from raypp.job.job_file import job_file
from raypp.state.run_records.status import loss_text, mesh_text, speed_text

_log = logging.getLogger("raypp")


class Run(RunControl):
    """A run, and what its checkpoints are used for. Every method raises `StoreError` if the store
    does not answer. The dictionaries are those of the commands' `--json`."""

    def queued(self) -> dict[str, Any] | None:
        """Returns the run's `place` in its cluster's line, the names `before` it, `expected_start`
        in seconds since 1970 or None, and the rest of its row of `raypp.queue()`; None if it does
        not wait. Raises UnreachableError: the cluster does not answer."""
        cluster = known_runs.cluster_of(self.place)
        return place_of(self.name, self.place.url, client.show(cluster)) if client.line_exists(cluster) else None

    def report(self, path: str | Path) -> Path:
        """Writes the page of `raypp report`."""
        from raypp.tools.report.collect import collect
        from raypp.tools.report.page import page

        path = Path(path)
        path.write_bytes(page([collect(self.place, self._reader)]).encode("utf-8", "replace"))
        return path

    def generate(
        self,
        prompts: Sequence[str],
        *,
        step: int | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        pp: int = 1,
        batch_size: int = 8,
        trust: bool = False,
    ) -> list[dict[str, Any]]:
        """Continues prompts with a checkpoint of the run, on this machine.

        Args:
            prompts: Texts.
            step: Step of the checkpoint; None: the newest.
            max_new_tokens, temperature, top_p, seed, pp, batch_size, trust: As in `raypp generate`.

        Returns:
            For each prompt `{"prompt", "text", "tokens", "finish"}`.
        """
        from raypp.api.inference import complete, row
        from raypp.tools.inference.prompts import Answer, encode_prompts
        from raypp.tools.inference.source import find_source

        source = find_source(f"{self.place.url}/{self.name}", step, trust=trust)
        tokenizer = source.open_tokenizer()
        answers = [Answer(prompt) for prompt in encode_prompts(source, tokenizer, list(prompts), max_new_tokens)]
        complete(source, pp, tokenizer, answers, batch_size, temperature=temperature, top_p=top_p, seed=seed)
        return [row(answer, tokenizer) for answer in answers]

    def export(self, path: str | Path, *, dtype: str | None = None, **options: Any) -> dict[str, Any]:
        """Writes the newest checkpoint as a Hugging Face model.

        Args:
            path: A directory, or a store's URL.
            dtype: fp32, bf16 or fp16; None: as saved.
            options: adapter, merged, shard_gb, tokenizer, trust: as `raypp checkpoints export`.

        Returns:
            What `raypp checkpoints export --json` prints.
        """
        from raypp.api.checkpoints import export

        return export(f"{self.place.url}/{self.name}", str(path), dtype=dtype, **options)

    def _repr_html_(self) -> str:
        """Shows the run in a notebook: state, figures, mesh and the curve of its loss."""
        status, rows = self.status(), self.history()
        figures = [
            ("state", status["state"]),
            ("step", f"{status['step']} of {status['steps']}"),
            ("loss", loss_text(status["loss"])),
            ("tokens/s", speed_text(status)),
            ("mesh", mesh_text(status["mesh"])),
            ("checkpoint", status["checkpoint"] or "none"),
        ]
        if status["error"]:
            figures.append(("error", status["error"]))
        cells = "".join(f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in figures)
        return f"<b>{html.escape(self.name)}</b><table>{cells}</table>{_curve(rows)}"


def load_job(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Job:
    """Loads and checks a job file. `overrides`: values by key, such as `{"train.steps": 200}`,
    which replace those of the file. Raises JobError: all problems, each with its location."""
    words = [f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()]
    return load_checked_job(path, words).job


def submit(
    job: Job, *, address: str | None = None, resume: bool = False, wait: bool = False, now: bool = False,
    priority: Priority = "normal", user: str | None = None, after: Sequence[str] = (),
) -> Run:  # fmt: skip
    """Checks a job, submits it to a cluster, and returns the run, which may wait in the line.

    What `raypp submit` says on the way, the logger `raypp` gets as warnings.

    Args:
        job: From `load_job`, or made in Python; relative paths are those of the working directory.
        address: URL of the cluster's dashboard; None: RAYPP_ADDRESS, then the embedded cluster.
        resume: Resume the run of this name from its newest checkpoint.
        wait: Return when the run has ended.
        now: Refuse a run that gets no devices now.
        priority: high | normal | low.
        user: Whose run it is, for the record; None: the operating system's name.
        after: Runs, or URL/NAME, that have to succeed first.

    Raises:
        JobError: The job cannot run there, its name is taken, or what it comes after has failed.
        UnreachableError: The cluster or the store does not answer.
        ResourcesError: The cluster has not enough devices; with `now`, not enough free ones.
        RunFailedError: With `wait`, the run has failed.
    """
    prepared = prepare(checked(job_file(job)), address, resume, _log.warning, now=now, after=after)
    if not prepared.waits:
        submitted = Run(start(prepared, _log.warning, priority=priority, user=user))
    else:
        queued = enqueue(prepared, _log.warning, priority, user)
        submitted = Run(queued.place)
        _log.warning("%s: %s", submitted.name, place_in_words(next(queued.follow(_log.warning, detach=True))))
    if wait:
        submitted.wait()
    return submitted


def run(name: str) -> Run:
    """Returns the run of a name, or of URL/NAME. Raises JobError: there is no such run."""
    return Run.find(name)


def list_runs() -> list[Run]:
    """Returns the runs that were submitted from here or that the cluster knows, newest first."""
    return [Run(place) for place in known_runs.known_runs()]


def _curve(rows: Sequence[dict[str, Any]], width: int = 480, height: int = 120) -> str:
    """Draws the loss over the steps as SVG; "" with fewer than two finite losses."""
    points = [(row["step"], row["loss"]) for row in rows if row["loss"] is not None and abs(row["loss"]) < 1e30]
    if len(points) < 2:
        return ""
    points = points[:: max(1, len(points) // width)]
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    wide, high = max(1, max(steps) - min(steps)), (max(losses) - min(losses)) or 1.0
    place = " ".join(
        f"{(step - min(steps)) / wide * width:.1f},{(max(losses) - loss) / high * height:.1f}" for step, loss in points
    )
    box = f'width="{width}" height="{height}" viewBox="-2 -2 {width + 4} {height + 4}"'
    return f'<svg {box}><polyline fill="none" stroke="currentColor" points="{place}"/></svg>'
