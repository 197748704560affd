"""Figures of a run as text: rates, durations, times of day, meshes."""

from __future__ import annotations

import time
from collections.abc import Mapping

from raypp.records import Coordinates


def quantity(value: float | None) -> str:
    """Formats a rate in about four characters: 873, 12.3k, 1.20M."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Formats a duration: 0:05, 12:30, 3:00:07, 2d 04:10."""
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def loss_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def clock(when: float) -> str:
    """Formats the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(when))


def date_and_clock(when: float) -> str:
    """Formats the local date and time of day."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Formats the axes longer than 1: `pp 2 · fsdp 2`; `1 rank` if there are none."""
    return " · ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "1 rank"


def rank_label(coordinates: Mapping[str, int], mesh: Mapping[str, int]) -> str:
    """Formats coordinates as in the rank's process title: `pp0-fsdp1`."""
    axes = ("pp", "dp_replicate", "fsdp", "cp")
    sizes = Coordinates(**{axis: mesh.get(axis, 1) for axis in axes})
    return Coordinates(**{axis: coordinates.get(axis, 0) for axis in axes}).label(sizes)


def seconds_text(value: float) -> str:
    """Formats a duration: 1.23 s, 45.6 ms, 120 µs."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return "0 s"
