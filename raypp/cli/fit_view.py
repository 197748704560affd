"""Shows what makes a job fit on the terminal: `raypp plan --fit`.

Plain lines: the terminal wraps them, and a copied line stays one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from raypp.cli.plan_view import count_text, time_text
from raypp.planning.costs import Device
from raypp.planning.fit import set_words
from raypp.planning.fit_search import Fitting, Proposal
from raypp.planning.stored_bytes import size_text
from raypp.spec.job import Job


def fit_view(found: Fitting, job: Job, device: Device) -> str:
    """Returns the lines of an answer.

    Args:
        found: The answer.
        job: The job.
        device: The kind of device.
    """
    return "\n".join(_lines(found, job, device))


def fit_document(found: Fitting) -> dict[str, Any]:
    """Returns an answer as plain JSON values."""
    return {
        "fits": found.now is not None,
        "need": found.need,
        "device_memory": found.capacity,
        "same": [_row(one) for one in found.same],
        "apart": [_row(one) for one in found.apart],
        "nearest": _row(found.nearest) if found.nearest else None,
        "more_devices": _row(found.more) if found.more else None,
        "tried": found.tried,
        "out_of_time": found.out_of_time,
    }


def _row(one: Proposal) -> dict[str, Any]:
    return {
        "settings": one.settings(),
        "devices": one.job.mesh.world,
        "step_s": one.forecast.step_s,
        "tokens_per_s": one.forecast.tokens_per_s,
        "peak_memory": one.peak,
        "costs": list(one.costs),
    }


def _lines(found: Fitting, job: Job, device: Device) -> Iterator[str]:
    world = job.mesh.world
    where = f"{world} × {device.name} ({size_text(device.memory)} each)"
    if found.now is not None:
        yield f"{job.name} already fits on {where}: a rank needs {size_text(found.need)}, {_speed(found.now)}"
        yield _assumptions(found.now)
        return
    yield f"{job.name} does not fit on {where}: a rank needs {size_text(found.need)}"
    if found.same:
        yield "\nfits with the same model, data and batch, fastest first:"
        yield from _listed(found.same)
    else:
        yield "\nnothing that was tried fits with the same model, data and batch"
        if found.nearest is not None:
            yield "the nearest:"
            yield from _listed([found.nearest])
    if found.more is not None:
        yield f"\nfits on {found.more.job.mesh.world} devices:"
        yield from _listed([found.more])
    if found.apart:
        yield "\nfits with another training:"
        yield from _listed(found.apart)
    said = f"\n{found.tried} combinations planned"
    yield said + ("; stopped before all were tried (raise --search-time)" if found.out_of_time else "")
    shown = [*found.same, *found.apart, *(one for one in (found.more, found.nearest) if one is not None)]
    if shown:
        yield _assumptions(shown[0])


def _listed(proposals: Iterable[Proposal]) -> Iterator[str]:
    for place, one in enumerate(proposals, start=1):
        costs = f"; {', '.join(one.costs)}" if one.costs else ""
        yield f"  {place}. {_speed(one)}, {size_text(one.peak)} per rank{costs}"
        yield f"     {set_words(one) or '(unchanged)'}"


def _speed(one: Proposal) -> str:
    return f"{time_text(one.forecast.step_s)} per step, {count_text(one.forecast.tokens_per_s)} tokens/s"


def _assumptions(one: Proposal) -> str:
    return f"assumptions: {'; '.join(one.forecast.sources)}"
