"""A run's records, and commands to it."""

import time
from collections.abc import Iterator
from typing import Any, Self

from raypp.control import client
from raypp.control.clusters import known_runs
from raypp.control.clusters.find import Cluster
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.find_run import POLL_S, ended_status, find_run, follow, open_reader, present_status
from raypp.errors import CheckpointError, JobError, Problem, RunFailedError
from raypp.records import Event, RunState
from raypp.state.checkpoint.retention import delete_run
from raypp.state.run_records.json_lines import LogLine
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.status import STATUS_KEYS, is_final
from raypp.untrusted.text import shell_word


class RunControl:
    """A run: its records, and commands to it. Every method raises `StoreError` if the store does
    not answer. Dictionaries are those of `--json`. `place`: of the run. `reader`: its records."""

    def __init__(self, place: RunPlace, reader: RunReader | None = None) -> None:
        self.place = place
        self._reader = reader or open_reader(place)

    @classmethod
    def find(cls, name: str) -> Self:
        """Returns the run of a name, or of URL/NAME. Raises JobError: there is no such run."""
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
        """Returns the output so far of all ranks, or one, each line behind its rank's place."""
        return [f"{label_of(line)} | {line.text}" for line in open_reader(self.place).logs(rank)]

    def follow(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of `history` as they come, those that exist first, until the run ends. A
        step that a restart repeats comes again. Ctrl-C leaves the run running."""
        seen: set[tuple[int, int]] = set()
        for records in follow(self.place, self._reader):
            for row in records.rows:
                if (key := (row["attempt"], row["step"])) not in seen:
                    seen.add(key)
                    yield dict(row)

    def wait(self) -> dict[str, Any]:
        """Waits for the run's end and returns its status. Raises RunFailedError: it has failed."""
        while not is_final(status := present_status(self.place, self._reader)):
            time.sleep(POLL_S)
        if status["state"] == RunState.FAILED:
            fix = f"see `raypp events {shell_word(self.name)}`"
            raise RunFailedError(Problem("RUN", f"{self.name} failed: {status['error']}", fix))
        return {key: status[key] for key in STATUS_KEYS}

    def save(self, on_wait: client.Waiting = lambda: None) -> dict[str, Any]:
        """Saves a checkpoint now; returns when it is committed. `on_wait`: called once if that
        takes longer than a minute. Returns `{"step", "what"}`: the committed step, and in which
        way. Raises JobError: the run has ended. Raises CheckpointError: the save failed."""
        answer = client.save_run(self._active(), self.place, on_wait)
        if not answer["found"]:
            raise self._not_active()
        if answer["committed"] is None:
            fix = f"see `raypp events {shell_word(self.name)}` for the cause"
            raise CheckpointError(Problem("RUN", answer["what"], fix))
        return {"step": answer["committed"], "what": answer["what"]}

    def stop(self, save: bool = True, on_wait: client.Waiting = lambda: None) -> dict[str, Any]:
        """Stops the run; returns when it has ended. `on_wait`: called once if that takes longer
        than a minute. Returns `{"state", "step", "checkpoint"}` at its end, also if it had ended
        before. Raises RunFailedError: it ended otherwise than by being stopped."""
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
        Returns `{"checkpoints", "objects", "bytes", "left"}`: steps, and numbers. What is left
        below the run's name it did not write."""
        state = present_status(self.place, self._reader)["state"]
        if not RunState(state).final:
            fix = f"stop it first: `raypp stop {shell_word(self.name)}`"
            raise JobError(Problem("RUN", f"{self.name} is {state}; a run can be deleted when it has ended", fix))
        gone, left = delete_run(self._reader.store, self.name, dry_run=dry_run)
        if not dry_run:
            known_runs.forget_run(self.place)
        return {"checkpoints": list(gone.steps), "objects": len(gone.objects), "bytes": gone.size, "left": left}

    def _active(self) -> Cluster:
        """Returns the run's cluster. Raises JobError: the run has ended."""
        if ended_status(self._reader) is not None:
            raise self._not_active()
        return known_runs.cluster_of(self.place)

    def _not_active(self) -> JobError:
        state = present_status(self.place, self._reader)["state"]
        words = state if RunState(state).final else f"{state} according to its records"
        return client.no_such_controller(self.name, words)


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
