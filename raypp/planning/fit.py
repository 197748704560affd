"""Whether a job fits into the memory of its devices; refusals that name the changes that fit.

By the planned memory, so an estimate. As a program, it answers a rank (`train.device_memory`): the
keyword arguments of `changes_in_words` come as JSON on its standard input, the sentence goes to its
standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace

from raypp.errors import Problem
from raypp.planning.costs import DEVICES
from raypp.planning.fit_search import PATIENCE_S, Proposal, changes_that_fit
from raypp.planning.machines import Machines
from raypp.planning.memory import memory_kind
from raypp.planning.peak import memory_of_ranks, too_little
from raypp.planning.search import Candidate
from raypp.planning.stored_bytes import size_text
from raypp.spec.job import Job
from raypp.spec.load import parse_job
from raypp.untrusted.text import shell_word

_IN_WORDS = 3


def set_words(one: Candidate) -> str:
    """Returns a candidate's changes as they are typed: `--set a=1 --set b=2`."""
    return " ".join(f"--set {shell_word(setting)}" for setting in one.settings())


def memory_problems(job: Job, capacity: int, host: Mapping[str, int] | None = None) -> list[Problem]:
    """Returns a problem if ranks need more memory than a device has, with changes that make it fit.

    Args:
        job: A job in which `check_plan` finds no problem.
        capacity: Bytes of the smallest device that a rank may get.
        host: As for `changes_in_words`.
    """
    lack = too_little(memory_of_ranks(job), capacity)
    return [Problem("train", lack, changes_in_words(job, capacity, host=host))] if lack else []


def changes_in_words(
    job: Job,
    capacity: int,
    factor: float = 1.0,
    patience_s: float = PATIENCE_S,
    host: Mapping[str, int] | None = None,
) -> str:
    """Returns the first changes of `changes_that_fit` as one sentence.

    They are ranked by their times on an unnamed device with free links.

    Args:
        job: A job in which `check_plan` finds no problem.
        capacity: Bytes of a device.
        factor: What a rank was measured to need, relative to its plan.
        patience_s: Most seconds to search.
        host: Free bytes of host memory by node, where they are known: no change offloads more.
    """
    device = replace(DEVICES[memory_kind(job)], memory=int(capacity / factor))
    machines = Machines.alike(job.mesh.world, max(1, job.mesh.world // job.mesh.pp), None)
    fits = changes_that_fit(job, machines, device, keep=_IN_WORDS, patience_s=patience_s, host=host)
    words = [_in_words(one, factor) for one in fits.same]
    if fits.more is not None:
        words.append(f"{_in_words(fits.more, factor)} on {fits.more.job.mesh.world} devices")
    words += [_in_words(one, factor) for one in fits.apart]
    if words:
        return f"fits by plan: {'; or '.join(words)}"
    nearest = f" (the nearest: {_in_words(fits.nearest, factor)})" if fits.nearest else ""
    none = f"no change that was tried fits into {size_text(capacity)} by plan{nearest}"
    return f"{none}: use more devices, or a smaller model or sequence"


def _in_words(one: Proposal, factor: float) -> str:
    costs = f", {', '.join(one.costs)}" if one.costs else ""
    return f"{set_words(one)} ({size_text(factor * one.peak)}{costs})"


if __name__ == "__main__":
    question = json.load(sys.stdin)
    sys.stdout.write(changes_in_words(parse_job(question.pop("job")), **question))
