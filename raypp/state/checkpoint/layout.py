"""Keys of a run's objects, relative to checkpoint.url; tensor_file.py lays out what is in them."""

import re

from raypp.errors import JobError, Problem
from raypp.job.job import RUN_NAME

ADVICE = "use an older checkpoint (a resume does so by itself)"
"""The fix of errors about a damaged checkpoint."""
_STEP = re.compile(r"step-([0-9]{1,12})")
_ATTEMPT = re.compile(r"attempt-([0-9]{1,9})")


def check_run(run: str) -> str:
    """Returns a run's name. Raises JobError: it is not of a-z, 0-9 and -, or longer than 40."""
    if not re.fullmatch(RUN_NAME, run):
        fix = "use a-z, 0-9 and -, at most 40, not - first"
        raise JobError(Problem("name", f"{run!r} is not a valid run name", fix))
    return run


def spec_key(run: str, number: int = 1) -> str:
    """Returns the key of the resolved job: `NAME/spec.json`, `NAME/spec-2.json` … for resumes."""
    return f"{run}/spec.json" if number == 1 else f"{run}/spec-{number}.json"


def spec_number(run: str, key: str) -> int | None:
    """Returns the number in a spec's key; None for any other key."""
    match = re.fullmatch(rf"{re.escape(run)}/spec(?:-([0-9]{{1,9}}))?\.json", key)
    number = None if match is None else int(match[1] or 1)
    return number if number is not None and key == spec_key(run, number) else None


def end_key(run: str, number: int = 1) -> str:
    """Returns the key of how the submission with a spec of this number ended."""
    return f"{run}/end.json" if number == 1 else f"{run}/end-{number}.json"


def queued_key(run: str, number: int = 1) -> str:
    """Returns the key of the ticket of a submission that waits, or waited, for devices."""
    return f"{run}/queued.json" if number == 1 else f"{run}/queued-{number}.json"


def gave_way_key(run: str, number: int, attempt: int) -> str:
    """Returns the key of an empty object: after this attempt the run gave way, and waits."""
    return f"{run}/queued-{number}-{attempt}.json"


def decision_key(run: str, attempt: int) -> str:
    """Returns the key of what was decided for an attempt: `NAME/decision-2.json`."""
    return f"{run}/decision-{attempt}.json"


def machine_key(run: str, number: int, version: int) -> str:
    """Returns the key of what a submission's controller had decided after so many transitions."""
    return f"{run}/machine/{number}-{version:06d}.json"


def machine_version(run: str, number: int, key: str) -> int | None:
    """Returns the version in a machine's key; None for any other key."""
    match = re.fullmatch(rf"{re.escape(run)}/machine/{number}-([0-9]{{6,12}})\.json", key)
    return None if match is None else int(match[1])


def attempt_key(run: str, attempt: int) -> str:
    """Returns the key of an attempt's claim; the process that creates it is that attempt."""
    return f"{run}/attempts/attempt-{attempt}"


def attempt_number(key: str) -> int | None:
    match = _ATTEMPT.fullmatch(key.rpartition("/")[2])
    return None if match is None else int(match[1])


def steps_prefix(run: str) -> str:
    """Returns the common prefix of all checkpoint objects of a run."""
    return f"{run}/step-"


def step_folder(run: str, step: int) -> str:
    return f"{run}/step-{step:08d}"


def commit_key(run: str, step: int) -> str:
    """Returns the key of the object whose existence makes the checkpoint exist."""
    return f"{step_folder(run, step)}/COMMIT"


def rank_key(run: str, step: int, attempt: int, rank: int) -> str:
    """Returns the key of the object that one rank writes in one attempt at one step."""
    return f"{step_folder(run, step)}/attempt-{attempt}/rank-{rank:05d}.safetensors"


def step_of(run: str, key: str) -> int | None:
    """Returns the step whose checkpoint an object belongs to; None if it belongs to none."""
    if not key.startswith(f"{run}/"):
        return None
    match = _STEP.fullmatch(key[len(run) + 1 :].split("/")[0])
    return None if match is None else int(match[1])


def split_location(text: str) -> tuple[str | None, str, int | None]:
    """Parses a command's argument: `NAME`, `URL/NAME`, or either followed by `/step-N`. Returns
    URL, run, step; URL and step may be None. Raises JobError: the run's name is invalid."""
    step = None
    address = text.rstrip("/")
    head, _, last = address.rpartition("/")
    match = _STEP.fullmatch(last)
    if match is not None and head:
        step, address = int(match[1]), head
    url, slash, run = address.rpartition("/")
    if slash and not url:
        url = "/"
    return (url if slash else None), check_run(run), step
