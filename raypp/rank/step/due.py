"""What is due when in a run: pure functions of the step, the job and the operator's requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raypp.job.job import Job
from raypp.records import Requests, SaveProgress


@dataclass(frozen=True)
class Place:
    """Where a run is.

    Attributes:
        done: Number of completed optimizer steps.
        restored: The step that this attempt started from.
        saved: The newest step that is in a checkpoint, or was begun to be saved.
        asked: Whether the operator waits for a save.
        stopping: Whether the operator waits for a save and the end.
        trace: Number of steps that the operator waits to see traced.
    """

    done: int
    restored: int
    saved: int
    asked: bool = False
    stopping: bool = False
    trace: int = 0

    @property
    def unsaved(self) -> bool:
        return self.done > self.saved

    def requests(self, new: Requests) -> Requests:
        """Returns the operator's new requests and those that wait."""
        stop = new.stop or self.stopping
        return replace(new, save=new.save or self.asked, stop=stop, trace=max(new.trace, self.trace))


@dataclass(frozen=True)
class Due:
    """What happens between two steps, in this order.

    Attributes:
        save: The state is saved.
        skip: It would be, but the last save is still in progress (`checkpoint.if_busy: skip`).
        stop: The operator ends the attempt.
        last: The job's steps are done.
        save_is_needed: The attempt fails if its last save does.
    """

    save: bool = False
    skip: bool = False
    stop: bool = False
    last: bool = False
    save_is_needed: bool = True
    trace: int = 0


def before_step(place: Place, requests: Requests, *, savable: bool = True, everyone: bool = True) -> tuple[Place, Due]:
    """Returns what is due when the ranks have agreed on requests, and the place after it.

    A request to save a state that is saved already is forgotten, but before the first step of an
    attempt it waits for that step. Where replicas differ, there is no state to save: requests wait
    for the next outer step, except one to stop without a save. `savable`: whether replicas hold the
    same weights. `everyone`: whether all ranks agreed; else those of one replica did, and requests
    wait.
    """
    if not everyone:
        return replace(place, asked=requests.save, trace=requests.trace), Due()
    if not savable and (requests.save_before_stop or not requests.stop):
        waiting = {"asked": place.asked or requests.save, "stopping": place.stopping or requests.stop}
        return replace(place, trace=0, **waiting), Due(trace=requests.trace)
    requests = replace(requests, stop=requests.stop or place.stopping)
    asked = (place.asked or requests.save) and (place.unsaved or place.done == place.restored)
    save = place.unsaved and (asked or (requests.stop and requests.save_before_stop))
    needed = not requests.stop or requests.save_before_stop
    due = Due(save=save, stop=requests.stop, save_is_needed=needed, trace=requests.trace)
    return replace(place, saved=place.done if save else place.saved, asked=asked and not save, trace=0), due


def after_step(place: Place, job: Job, saving: SaveProgress) -> tuple[Place, Due]:
    """Returns what is due after a step, and the place after it. `saving`: how far the last save was
    when the step began, on the rank where it is worst: all ranks agreed on it, so all leave out the
    same saves. None waits for a store that does not take the last one."""
    done, every = place.done + 1, job.checkpoint.every_steps
    last = done == job.train.steps
    save = last or bool(every and done % every == 0)
    stuck = saving is SaveProgress.STUCK
    skip = save and not last and not stuck and bool(saving) and job.checkpoint.if_busy == "skip"
    save = save and not skip and (last or not stuck)
    return replace(place, done=done, saved=done if save else place.saved), Due(save=save, skip=skip, last=last)


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether something is due after a step: every so many steps and at the end."""
    return step % every == 0 or step == steps
