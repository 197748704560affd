"""Finds a trained model: a run, a checkpoint of it, or a Hugging Face folder. Without torch."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raypp.control.clusters.find import lend_store_settings
from raypp.errors import CheckpointError, DataError, JobError, Problem
from raypp.job.job import AddedToken, Job
from raypp.job.load import parse_job
from raypp.job.models import DecoderOptions
from raypp.job.paths import is_remote
from raypp.job.precision import DTYPES, FP32, PRECISIONS
from raypp.job.tokenizer_file import BESIDE, BOUNDS, TOKENIZER
from raypp.planning.resolve import cut_of
from raypp.rank.data.chat_files import no_template, open_template
from raypp.rank.data.chat_template import ChatTemplate
from raypp.rank.data.tokenizer import AddBos, FileTokenizer, PromptTokenizer, added_in, check_fits, open_tokenizer
from raypp.state.checkpoint.commit import Commit, list_checkpoints, read_commit
from raypp.state.checkpoint.known_jobs import guarded, read_job
from raypp.state.checkpoint.saved_tensors import SavedTensors
from raypp.state.hf.from_hf import hf_options
from raypp.state.hf.model_files import GENERATION, HfFiles
from raypp.state.hf.original import (
    end_ids,
    model_context,
    original_ends,
    saved_options,
    section_of,
    trained_length,
    unused_settings,
)
from raypp.storage import NotFound, ObjectStore, open_store
from raypp.untrusted.files import expand_home

KEY = "RUN"
_SHOWN = 5


@dataclass(frozen=True)
class Source:
    """A trained model. `dataclasses.asdict` gives plain JSON values, `Source(**values)` takes them.

    Attributes:
        place: Where it is, for messages.
        context: Longest sequence, in tokens.
        precision: The dtype that it was trained or stored in, by its name in a job.
        tokenizer: `bytes`, or the path or URL of a tokenizer.json; None: there is none.
        add_bos: `data.add_bos` of the run. False for runs that are older than the key.
        eos_ids: The ids that end a text, as generation_config.json says. Empty: the tokenizer's.
        store: URL of the run's store; None: the weights are in the files of `model.from_hf`.
        run: The run's name; empty for a Hugging Face folder.
        document: The run's resolved job, as it was submitted; empty for a Hugging Face folder.
    """

    place: str
    model: Mapping[str, Any]
    context: int
    precision: str
    tokenizer: str | None
    eos_ids: tuple[int, ...] = ()
    store: str | None = None
    run: str = ""
    step: int = 0
    document: Mapping[str, Any] | None = None
    remarks: tuple[str, ...] = ()
    add_bos: AddBos = "auto"

    def job(self, pp: int = 1, *, precision: str = "fp32") -> Job:
        """Returns a job of this model on a mesh of `pp` ranks, with one stage each. `precision`:
        one whose weights have the dtype of its products. Raises JobError: the model has fewer
        layers than there are ranks, or is one of the user's own."""
        train = section_of(self.document, "train")
        sections = {"model": dict(self.model), "mesh": {"pp": pp}, "pipeline": {"microbatches": pp}}
        chosen = {"precision": precision, "seed": train.get("seed", 0)}
        job = parse_job({"name": self.run or "model", **sections, "train": chosen})
        if ":" in job.model.kind:
            fault = f"{job.model.kind} of {self.place} is a model of your own: raypp does not know its attention"
            raise JobError(Problem("model.kind", fault, "use its own code, or a built-in family"))
        if pp > job.model.num_layers:
            fault = f"pp={pp} has more ranks than {self.place} has layers, {job.model.num_layers}"
            raise JobError(Problem("--mesh", fault, f"use pp={job.model.num_layers} or less"))
        cut_of(job)
        return job

    def open_tokenizer(self) -> PromptTokenizer:
        """Opens the tokenizer. Raises JobError: none, or it does not fit; DataError: a bad file."""
        if self.tokenizer is None:
            fix = "put the tokenizer.json that it was trained with beside config.json"
            if self.run:
                fix = "resume the run with data.tokenizer, or export it and put a tokenizer.json into the folder"
            raise JobError(Problem(KEY, f"{self.place} has no tokenizer", fix))
        opened = _fetched if is_remote(self.tokenizer) else open_tokenizer
        data = section_of(self.document, "data")
        tokenizer = opened(
            self.tokenizer, self.add_bos, added_in(data) if self.tokenizer == data.get("tokenizer") else ()
        )
        if problems := check_fits(tokenizer, int(self.model["vocab_size"])):
            fix = "use the tokenizer that the model was trained with"
            raise JobError(Problem(KEY, f"{self.place}: {problem.fault}", fix) for problem in problems)
        return tokenizer

    def open_template(self) -> ChatTemplate:
        """Opens the chat template of the run's job, or the one beside the tokenizer. A template
        that asks for the date gets today's, unless the job names one. Raises JobError: there is
        none, or it is in a store. Raises DataError: it cannot be read."""
        tokenizer, known = self.tokenizer or "bytes", section_of(self.document, "data")
        if is_remote(tokenizer):
            fault = f"{self.place} is in a store, where no chat template is looked for"
            raise JobError(Problem("--chat", fault, "copy the model into a folder of this machine"))
        day = known.get("template_date") or date.today().isoformat()
        named = {"tokenizer": tokenizer, "chat_template": known.get("chat_template"), "template_date": day}
        data = parse_job({"name": "model", "data": named}).data
        template = open_template(data)
        if template is None:
            raise JobError(replace(problem, key="--chat") for problem in no_template(data).problems)
        return template


def find_source(argument: str, step: int | None = None, *, trust: bool = False) -> Source:
    """Returns the model that an argument names. `argument`: a run's name, `URL/NAME` or
    `URL/NAME/step-N` (URL may be a folder), or the folder or S3 URL of a Hugging Face model.
    `step`: the step of the run's checkpoint. None: the newest that can be read. `trust`: own code
    and local files that the run's job names may be used, whoever wrote it. Raises JobError: the
    argument names neither, or there is no such step; CheckpointError: the run has no checkpoint, or
    none can be read; StoreError: the store does not answer."""
    lend_store_settings()
    if _is_hf_folder(argument):
        if step is not None:
            fix = "leave out --step"
            raise JobError(Problem("--step", f"{argument} is a Hugging Face model, which has no steps", fix))
        return _of_folder(argument)
    store, run, named = _run_at(argument)
    if step is not None and named is not None and step != named:
        raise JobError(Problem("--step", f"is {step}, but {KEY} names step {named}", "leave out one of them"))
    commit, _, skipped = newest_checkpoint(store, run, named if step is None else step)
    return _of_run(store, commit, skipped, trust)


def committed_steps(store: ObjectStore, run: str, only: int | None) -> list[int]:
    """Returns a run's committed steps, or the one asked for. Raises JobError: it is not there."""
    steps = [checkpoint.step for checkpoint in list_checkpoints(store, run)]
    if only is None:
        return steps
    if only not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise JobError(Problem(KEY, f"step {only} of {run} is not committed", f"committed steps: {there}"))
    return [only]


def nothing_committed(store: ObjectStore, run: str) -> CheckpointError:
    place = f"{store.url}/{run}"
    return CheckpointError(Problem(place, "has no committed checkpoint", "wait for the run's first save"))


def newest_checkpoint(
    store: ObjectStore, run: str, step: int | None = None
) -> tuple[Commit, SavedTensors, list[Problem]]:
    """Finds a run's newest checkpoint of which COMMIT and all headers can be read. `step`: only
    this one; None: any. Returns COMMIT, the tensors, and the problems of newer ones. Raises
    JobError: the step is not committed; CheckpointError: none can be read."""
    if not (steps := committed_steps(store, run, step)):
        raise nothing_committed(store, run)
    unusable: list[Problem] = []
    for number in reversed(steps):
        try:
            commit = read_commit(store, run, number)
            return commit, SavedTensors(store, commit), unusable
        except CheckpointError as error:
            unusable.extend(error.problems[:1])
    raise CheckpointError(unusable[:_SHOWN])


def _is_hf_folder(argument: str) -> bool:
    if is_remote(argument):
        return open_store(argument).head("config.json") is not None
    return os.path.lexists(expand_home(argument) / "config.json")


def _run_at(argument: str) -> tuple[ObjectStore, str, int | None]:
    """Returns store, name and step of a run that exists. Raises JobError: there is no such run."""
    local = not is_remote(argument) and ("/" in argument or argument in (".", "~"))
    folder = expand_home(argument).absolute() if local else None
    if folder is not None and os.path.isdir(folder) and not _holds_run(folder):  # noqa: PTH112 - raises for no name
        raise _neither(argument, folder)
    from raypp.control.find_run import open_run  # ranks import this module, too, and find no run

    return open_run(argument if folder is None else str(folder))


def _holds_run(folder: Path) -> bool:
    """Whether a local folder is a run's, or that of one of its checkpoints."""
    return any(next(folder.glob(name), None) is not None for name in ("spec*.json", "step-*", "COMMIT"))


def _neither(argument: str, folder: Path) -> JobError:
    fault = f"{argument} is neither a run (no spec.json, no checkpoint) nor a Hugging Face model (no config.json)"
    fix = "name a run, a folder of a store with the run's name, or a folder with config.json and safetensors"
    if (folder / "adapter_config.json").exists():
        fault = f"{argument} has adapters without the model they belong to"
        fix = "name the run that trained them, or export it with --merged"
    return JobError(Problem(KEY, fault, fix))


def _of_run(store: ObjectStore, commit: Commit, skipped: list[Problem], trust: bool) -> Source:
    place = f"{store.url}/{commit.run}/step-{commit.step:08d}"
    commit = replace(commit, job=guarded(commit.job, trust=trust))
    try:
        document = read_job(store, commit.run, trust=trust)
    except CheckpointError:
        document = commit.job
    options = saved_options(store, commit)
    data, train = section_of(document, "data"), section_of(document, "train")
    tokenizer = data.get("tokenizer")
    remarks = [f"step {commit.step} is used: {problem.key}: {problem.fault}" for problem in skipped[:_SHOWN]]
    return Source(
        place=place,
        model=options.model_dump(mode="json"),
        context=model_context(options, trained_length(document)),
        precision=PRECISIONS.get(str(train.get("precision")), PRECISIONS["fp32"]).compute.name,
        tokenizer=tokenizer if isinstance(tokenizer, str) else None,
        eos_ids=original_ends(options) or (_ids_beside(tokenizer) if isinstance(tokenizer, str) else ()),
        store=store.url,
        run=commit.run,
        step=commit.step,
        document=document,
        remarks=(*remarks, *unused_settings(options)),
        add_bos=data.get("add_bos", False),
    )


def _of_folder(argument: str) -> Source:
    url = argument.rstrip("/") if is_remote(argument) else str(expand_home(argument).absolute())
    files = HfFiles(url)
    config = files.config()
    options = hf_options(DecoderOptions(from_hf=url))
    there = files.store.head(TOKENIZER) is not None
    dtype = config.get("dtype") or config.get("torch_dtype")
    return Source(
        place=url,
        model=options.model_dump(mode="json"),
        context=model_context(options),
        precision=next((known.name for known in DTYPES.values() if known.torch == dtype), FP32.name),
        tokenizer=files.place(TOKENIZER) if there else None,
        eos_ids=original_ends(options) or end_ids(None, config),
        remarks=tuple(unused_settings(options)),
    )


def _ids_beside(tokenizer: str) -> tuple[int, ...]:
    """Returns the ids of generation_config.json beside a tokenizer.json, as in an export."""
    folder = expand_home(tokenizer).parent
    if is_remote(tokenizer) or Path(tokenizer).name != TOKENIZER or not (folder / GENERATION).is_file():
        return ()
    return end_ids(HfFiles(str(folder)).generation_config(), {})


def _fetched(url: str, add_bos: AddBos, added: Sequence[AddedToken]) -> PromptTokenizer:
    folder, _, key = url.rpartition("/")
    files = HfFiles(folder)
    with TemporaryDirectory() as here:
        path = Path(here) / key
        content = files.store.get(key, 0, BOUNDS.size + 1)
        if len(content) > BOUNDS.size:
            raise DataError(Problem(KEY, f"{url} has more than {BOUNDS.size:,} bytes", "check the file"))
        path.write_bytes(content)
        for name in BESIDE:
            with suppress(NotFound):
                (Path(here) / name).write_bytes(files.store.get(name, 0, BOUNDS.size))
        return FileTokenizer(path, add_bos, added)
