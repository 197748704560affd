"""Keeps the results of a benchmark on disk: an interruption loses only the current measurement."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.surroundings import describe

FOLDER = Path.home() / ".cache" / "raypp" / "benchmarks"


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that makes a benchmark continue after an interruption."""
    help_text = "continue an interrupted benchmark (its settings must be the same)"
    parser.add_argument("--resume", action="store_true", help=help_text)


class Kept:
    """Results by key, written to disk after each new one.

    Args:
        name: Name of the benchmark.
        settings: What the results depend on. Results with other settings are not reused.
        resume: Whether to reuse the existing results. Otherwise the benchmark starts anew.

    Raises:
        SystemExit: The existing results have other settings.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.path = FOLDER / f"{name}.json"
        self._document: dict[str, Any] = {"settings": dict(settings), "begun": describe(), "found": {}}
        if resume and self.path.exists():
            there = json.loads(self.path.read_text())
            if there["settings"] != json.loads(json.dumps(self._document["settings"])):
                raise SystemExit(
                    f"{self.path} has results with other settings, {there['settings']}: run without --resume"
                )
            self._document = there
            print(f"continuing with {len(there['found'])} results from {there['begun']}", flush=True)
        print(f"results so far: {self.path}", flush=True)

    @property
    def begun(self) -> str:
        """Date, hardware, versions and commit at the start of the measurements."""
        return str(self._document["begun"])

    def __contains__(self, key: str) -> bool:
        return key in self._document["found"]

    def __getitem__(self, key: str) -> Any:
        return self._document["found"][key]

    def keep(self, key: str, result: Any) -> Any:
        """Returns the existing result of a key, or writes and returns `result`."""
        return self.once(key, lambda: result)

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        """Returns the existing result of a key, or measures and writes it (plain JSON)."""
        found = self._document["found"]
        if key not in found:
            found[key] = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps(self._document, indent=1))
            fresh.replace(self.path)
        return found[key]
