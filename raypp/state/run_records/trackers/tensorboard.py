"""TensorBoard: event files, which `tensorboard --logdir` shows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypp.kinds import TrackerKind
from raypp.state.run_records.tracked import LOGDIR, TrackedRun
from raypp.untrusted.text import shell_word

KIND = TrackerKind(
    "tensorboard",
    "event files for TensorBoard",
    position=10,
    library="tensorboard",
    install="raypp[tensorboard]",
    settings={"dir": "folder of the node that leads the run; default: the run's folder in its store"},
)

_PART_BYTES = 1 << 20
"""Size from which on another file is begun: a file that is copied to a store is copied whole."""
_FLUSH_S = 5


class TensorBoard:
    """Writes event files. A rewound step is marked, and TensorBoard then drops what is void."""

    newest = 0

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._events, self._summaries, self._text_pb = event_pb2, summary_pb2, text_pb
        self._folder = run.folder
        self._begin_file()
        self.where = f"raypp tensorboard {shell_word(run.name)}, or {LOGDIR}{run.shown_folder}"

    def _begin_file(self) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        before = set(self._folder.iterdir())
        self._writer = EventFileWriter(str(self._folder), max_queue_size=100, flush_secs=_FLUSH_S)
        self._file: Path = next(iter(set(self._folder.iterdir()) - before))

    def _add(self, step: int, time: float, **content: Any) -> None:
        if self._file.stat().st_size > _PART_BYTES:
            self._writer.close()
            self._begin_file()
        self._writer.add_event(self._events.Event(step=step, wall_time=time, **content))

    def values(self, step: int, time: float, values: Mapping[str, float]) -> None:
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, time, summary=self._summaries.Summary(value=scalars))

    def text(self, step: int, time: float, name: str, text: str) -> None:
        self._add(step, time, summary=self._text_pb(name, text))

    def rewind(self, step: int) -> bool:
        import time

        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(step, time.time(), session_log=start)
        return True

    def close(self, state: str) -> None:
        self._writer.close()


open_tracker = TensorBoard
