"""`model.from_run`: a run that begins with the model and the weights of another."""

from dataclasses import replace
from typing import Any

from raypp.errors import JobError, Problem
from raypp.job.job_file import JobFile
from raypp.job.known_families import family_of
from raypp.job.load import parse_job
from raypp.job.models import DecoderOptions
from raypp.state.checkpoint.commit import list_checkpoints
from raypp.state.checkpoint.known_jobs import read_job
from raypp.state.checkpoint.layout import split_location
from raypp.storage import ObjectStore, open_store
from raypp.untrusted.text import visible

_KEY = "model.from_run"


def with_run_model(file: JobFile) -> JobFile:
    """Returns the job with the model of the run that `model.from_run` names, but for keys that it
    gives itself; unchanged if it names none. Raises JobError: the run's weights cannot be this
    job's; CheckpointError: there is no such run; StoreError: its store does not answer."""
    model = file.job.model
    if model.from_run is None:
        return file
    store, run, _ = first_run(model.from_run)
    old: dict[str, Any] = read_job(store, run, trust=False)["model"]
    fault, fix = "", "remove one of the two"
    if model.from_hf is not None:
        fault = "a run begins with one model's weights, and model.from_hf is set, too"
    elif model.lora is not None or old.get("lora") is not None:
        fault = "adapters have a base of their own"
        form = " --merged" if old.get("lora") is not None else ""
        fix = f"`raypp checkpoints export {visible(run)} DIR{form}`, and name DIR with model.from_hf"
    elif "kind" in model.model_fields_set and model.kind != old["kind"]:
        fault, fix = f"{visible(run)} is of kind {visible(old['kind'])}, not {model.kind}", "leave out model.kind"
    if fault:
        raise JobError(file.locate(Problem(_KEY, fault, fix)))
    given = model.model_dump(mode="json", include=model.model_fields_set)
    job, before = (parse_job({"name": run, "model": old | {"from_hf": None} | keys}) for keys in (given, {}))
    wanted, held = _shapes(job.model), _shapes(before.model)
    if wrong := [name for name in held | wanted if held.get(name) != wanted.get(name)]:
        shapes = (" × ".join(map(str, shapes.get(wrong[0], ()))) or "not there" for shapes in (held, wanted))
        fault = "{} of {} is {}, and with the keys beside it would be {}".format(wrong[0], visible(run), *shapes)
        keys = [f"model.{key}" for key, value in given.items() if key != "from_run" and value != old.get(key)]
        which = "" if len(keys) == 1 else "what changes it of "
        raise JobError(file.locate(Problem(_KEY, fault, f"leave out {which}{', '.join(keys)}")))
    return replace(file, job=file.job.model_copy(update={"model": job.model}))


def _shapes(options: DecoderOptions) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights by global name, and its numbers of heads; of a user's
    own model none."""
    if (family := family_of(options)) is None:
        return {}
    heads = {"num_heads": (options.num_heads,), "num_kv_heads": (options.num_kv_heads or options.num_heads,)}
    return heads | {name: weight.shape for name, weight in family.model_weights(options).items()}


def first_run(location: str) -> tuple[ObjectStore, str, int | None]:
    """Returns store, name, step (None: newest) of `model.from_run`. Raises JobError: no store."""
    url, run, step = split_location(location)
    if url is None:
        raise JobError(Problem(_KEY, f"{visible(location)} names no store", "write URL/NAME"))
    return open_store(url), run, step


def check_first_run(location: str, after: list[str]) -> None:
    """Checks that a run can begin with another's weights. `after`: runs that will have ended
    before, as URL/NAME. Raises JobError: there is no such checkpoint."""
    store, run, step = first_run(location)
    steps = [checkpoint.step for checkpoint in list_checkpoints(store, run)]
    if (not steps and f"{store.url}/{run}" not in after) or (step is not None and step not in steps):
        fault = f"{visible(run)} has no checkpoint{'' if step is None else f' of step {step}'}"
        fix = f"committed steps: {', '.join(map(str, steps))}" if steps else f"wait for it: --after {visible(run)}"
        raise JobError(Problem(_KEY, fault, fix))
