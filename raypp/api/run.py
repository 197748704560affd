"""A run from Python: `raypp.submit` and `raypp.run` return one; texts of its model."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from raypp.api.find_run import POLL_S, ended_status, find_run, follow, open_reader, present_status
from raypp.checkpoint.retention import delete_run
from raypp.clusters import known_runs
from raypp.clusters.find import Cluster
from raypp.clusters.known_runs import RunPlace
from raypp.control import client
from raypp.control.inference_client import use_on_cluster
from raypp.data.tokenizer import PromptTokenizer
from raypp.errors import CheckpointError, JobError, Problem, RunFailedError
from raypp.inference.processes import Generators, NewToken
from raypp.inference.prompts import Answer, end_ids
from raypp.inference.source import Source
from raypp.observe.json_lines import LogLine
from raypp.observe.reader import RunReader
from raypp.observe.status import STATUS_KEYS, is_final, loss_text, mesh_text, quantity
from raypp.records import Event, RunState
from raypp.untrusted.text import shell_word


class Run:
    """A run: its records, and commands to it.

    Every method raises `StoreError` if the store does not answer. The dictionaries are those of the
    commands' `--json`.

    Args:
        place: Where it is stored, and where it runs.
        reader: Its records.
    """

    def __init__(self, place: RunPlace, reader: RunReader | None = None) -> None:
        self.place = place
        self._reader = reader or open_reader(place)

    @classmethod
    def find(cls, name: str) -> Run:
        """Returns the run of a name, or of URL/NAME.

        Raises:
            JobError: There is no such run. The message suggests close names.
        """
        return cls(*find_run(name))

    @property
    def name(self) -> str:
        return self.place.name

    def __repr__(self) -> str:
        return f"Run({self.place.url}/{self.name})"

    def status(self) -> dict[str, Any]:
        """Returns state, step, loss, speed, mesh and ranks, as `raypp status --json`."""
        status = present_status(self.place, self._reader)
        return {key: status[key] for key in STATUS_KEYS}

    def history(self) -> list[dict[str, Any]]:
        """Returns a row per step, oldest first; a step that was repeated after a restart once."""
        return self._reader.history()

    def events(self) -> list[dict[str, Any]]:
        """Returns what happened, oldest first, as `raypp events --json`."""
        return [event_json(event) for event in self._reader.events()]

    def logs(self, rank: int | None = None) -> list[str]:
        """Returns the output so far of the ranks, or of one, each line behind its rank's
        coordinates."""
        return [f"{label_of(line)} | {line.text}" for line in open_reader(self.place).logs(rank)]

    def follow(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of `history` as they come, those that exist first, until the run ends.

        A step that a restart repeats comes again. Ctrl-C leaves the run running.
        """
        seen: set[tuple[int, int]] = set()
        for records in follow(self.place, self._reader):
            for row in records.rows:
                if (key := (row["attempt"], row["step"])) not in seen:
                    seen.add(key)
                    yield dict(row)

    def wait(self) -> dict[str, Any]:
        """Waits for the run's end and returns its status.

        Raises:
            RunFailedError: The run has failed.
        """
        while not is_final(status := present_status(self.place, self._reader)):
            time.sleep(POLL_S)
        if status["state"] == RunState.FAILED:
            fix = f"see `raypp events {shell_word(self.name)}`"
            raise RunFailedError(Problem("RUN", f"{self.name} failed: {status['error']}", fix))
        return {key: status[key] for key in STATUS_KEYS}

    def save(self, on_wait: client.Waiting = lambda: None) -> dict[str, Any]:
        """Saves a checkpoint now; returns when it is committed.

        Args:
            on_wait: Called once if that takes longer than a minute.

        Returns:
            `{"step", "what"}`: the committed step, and in which way.

        Raises:
            JobError: The run has ended.
            CheckpointError: The save failed.
        """
        answer = client.save_run(self._active(), self.place, on_wait)
        if not answer["found"]:
            raise self._not_active()
        if answer["committed"] is None:
            fix = f"see `raypp events {shell_word(self.name)}` for the cause"
            raise CheckpointError(Problem("RUN", answer["what"], fix))
        return {"step": answer["committed"], "what": answer["what"]}

    def stop(self, save: bool = True, on_wait: client.Waiting = lambda: None) -> dict[str, Any]:
        """Stops the run; returns when it has ended.

        Args:
            save: Whether a last checkpoint is saved.
            on_wait: Called once if that takes longer than a minute.

        Returns:
            `{"state", "step", "checkpoint"}` at its end, also if it had ended before.

        Raises:
            RunFailedError: It ended otherwise than by being stopped.
        """
        answer: dict[str, Any] = {"found": False}
        if ended_status(self._reader) is None:
            cluster = known_runs.cluster_of(self.place)
            answer = client.stop_run(cluster, self.place, self._reader.store, save=save, on_wait=on_wait)
        if not answer["found"]:
            answer = present_status(self.place, self._reader)
            if not is_final(answer):
                raise self._not_active()
        if answer.get("exit_code"):
            fault = f"{self.name}: {end_in_words(answer)}: {answer['reason']}"
            raise RunFailedError(Problem("RUN", fault, f"see `raypp events {shell_word(self.name)}`"))
        return {key: answer[key] for key in ("state", "step", "checkpoint")}

    def delete(self, *, dry_run: bool = False) -> dict[str, Any]:
        """Deletes what the run has in its store once it has ended; with `dry_run` only tells it.

        Returns:
            `{"checkpoints", "objects", "bytes", "left"}`: steps, and numbers. What is left below
            the run's name it did not write.
        """
        state = present_status(self.place, self._reader)["state"]
        if not RunState(state).final:
            fix = f"stop it first: `raypp stop {shell_word(self.name)}`"
            raise JobError(Problem("RUN", f"{self.name} is {state}; a run can be deleted when it has ended", fix))
        gone, left = delete_run(self._reader.store, self.name, dry_run=dry_run)
        if not dry_run:
            known_runs.forget_run(self.place)
        return {"checkpoints": list(gone.steps), "objects": len(gone.objects), "bytes": gone.size, "left": left}

    def report(self, path: str | Path, *, trust: bool = False) -> Path:
        """Writes the page of `raypp report`; `trust` as its option."""
        from raypp.api.report.collect import collect
        from raypp.api.report.page import page

        path = Path(path)
        path.write_bytes(page([collect(self.place, self._reader, trust=trust)]).encode("utf-8", "replace"))
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
            max_new_tokens, temperature, top_p, seed, pp, batch_size, trust: As the options of
                `raypp generate`.

        Returns:
            For each prompt `{"prompt", "text", "tokens", "finish"}`.
        """
        from raypp.inference.prompts import Answer, encode_prompts
        from raypp.inference.source import find_source

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
            options: `adapter`, `merged`, `shard_gb`, `tokenizer`, `trust`: as `raypp checkpoints
                export`.

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
            ("tokens/s", quantity(status["tokens_per_s"])),
            ("mesh", mesh_text(status["mesh"])),
            ("checkpoint", status["checkpoint"] or "none"),
        ]
        if status["error"]:
            figures.append(("error", status["error"]))
        cells = "".join(f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in figures)
        return f"<b>{html.escape(self.name)}</b><table>{cells}</table>{_curve(rows)}"

    def _active(self) -> Cluster:
        """Returns the run's cluster.

        Raises:
            JobError: The run has ended.
        """
        if ended_status(self._reader) is not None:
            raise self._not_active()
        return known_runs.cluster_of(self.place)

    def _not_active(self) -> JobError:
        state = present_status(self.place, self._reader)["state"]
        words = state if RunState(state).final else f"{state} according to its records"
        return client.no_such_controller(self.name, words)


def list_runs() -> list[Run]:
    """Returns the runs that were submitted from here or that the cluster knows, newest first."""
    return [Run(place) for place in known_runs.known_runs()]


def end_in_words(end: dict[str, Any]) -> str:
    """Returns what `Run.stop` returned in words."""
    return f"{end['state']} at step {end['step']}; newest checkpoint: {end['checkpoint'] or 'none'}"


def event_json(event: Event) -> dict[str, Any]:
    """Returns an event as `raypp events --json` shows it."""
    shown = ("time", "kind", "message", "attempt", "step", "rank", "node")
    return {
        **{name: getattr(event, name) for name in shown},
        "cause": event.details.get("cause"),
        "details": event.details,
    }


def label_of(line: LogLine) -> str:
    """Returns who wrote a line: a rank's coordinates, or the controller."""
    return line.label or ("controller" if line.rank is None else f"rank{line.rank}")


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


def complete(
    source: Source,
    pp: int,
    tokenizer: PromptTokenizer,
    answers: Sequence[Answer],
    rows: int,
    cluster: Cluster | None = None,
    on_token: Callable[[], None] = lambda: None,
    **choice: Any,
) -> None:
    """Generates the texts of all answers.

    Args:
        source: The model.
        pp: Number of pipeline ranks.
        tokenizer: Its tokenizer.
        answers: One per prompt; they take the new tokens.
        rows: Prompts that are decoded together.
        cluster: Where the ranks run; None: on this machine.
        on_token: Called after each new token.
        choice: `temperature`, `top_p` and `seed`.

    Raises:
        RunFailedError: The generation ended before all texts were complete.
    """

    def take(new: NewToken) -> None:
        answers[new.prompt].add(new.token, new.finish)
        on_token()

    ends, prompts = end_ids(source, tokenizer), [answer.prompt for answer in answers]
    if cluster is None:
        with Generators(source, pp, ends, rows) as generators:
            for new in generators.generate(prompts, **choice):
                take(new)
        return
    asked = [[prompt.tokens, prompt.limit] for prompt in prompts]
    request = {"prompts": asked, "choice": choice, "ends": list(ends), "rows": rows}
    with closing(use_on_cluster(cluster, "generate", source, source.job(pp), request)) as reports:
        for report in reports:
            if "token" in report and report["token"][0] < len(answers):
                take(NewToken(*report["token"]))
    if any(answer.finish is None for answer in answers):
        raise RunFailedError("the generation on the cluster ended before all texts were complete")


def row(answer: Answer, tokenizer: PromptTokenizer) -> dict[str, Any]:
    """Returns an answer as `raypp generate --json` prints it."""
    text = answer.text(tokenizer)
    return {"prompt": answer.prompt.text, "text": text, "tokens": answer.tokens, "finish": answer.finish}
