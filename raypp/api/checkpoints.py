"""Finds the checkpoint that an argument refers to, and exports it."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from raypp.api.submission import Say
from raypp.control.clusters.find import lend_store_settings
from raypp.control.find_run import open_run
from raypp.errors import CheckpointError, JobError, Problem
from raypp.job import precision
from raypp.job.models import LoraOptions
from raypp.state.checkpoint.commit import Commit
from raypp.state.checkpoint.known_jobs import NOT_YOURS, guarded, read_job
from raypp.state.checkpoint.layout import step_folder
from raypp.state.checkpoint.retention import BestOf
from raypp.state.checkpoint.saved_tensors import SavedTensors
from raypp.state.hf.original import saved_options
from raypp.state.run_records.reader import RunReader
from raypp.storage import ObjectStore, open_for_others
from raypp.tools.export.export_adapter import export_adapter
from raypp.tools.export.export_model import export_hf
from raypp.tools.inference.source import committed_steps, newest_checkpoint
from raypp.untrusted.text import visible

DTYPES = {name: dtype.saved for name, dtype in precision.DTYPES.items()} | {"fp16": "F16"}
_SHOWN = 5


def open_checkpoint(argument: str, say: Say) -> tuple[ObjectStore, Commit, SavedTensors]:
    """Returns the checkpoint that an argument refers to. Without a step, the newest of which COMMIT
    and all headers can be read; `say` gets the others. Raises JobError: there is no such run, or no
    such step. Raises CheckpointError: the run has no checkpoint, or none can be read."""
    store, name, step = open_run(argument)
    commit, tensors, unusable = newest_checkpoint(store, name, step)
    if unusable:
        skipped = "\n".join(f"  {visible(f'{problem.key}: {problem.fault}')}" for problem in unusable[:_SHOWN])
        say(f"step {commit.step} is used, because newer checkpoints cannot be read:\n{skipped}")
    return store, commit, tensors


def best_checkpoint(argument: str) -> str:
    """Returns URL/NAME/step-N of a run's checkpoint with the least loss on the held-out part.
    Raises JobError: the argument names a step, or no checkpoint was evaluated."""
    store, name, step = open_run(argument)
    if step is not None:
        raise JobError(Problem("--best", f"step {step} is named, too", "leave out one of the two"))
    losses = RunReader(store, name).eval_losses()
    found = BestOf(1, losses).among(committed_steps(store, name, None))
    if not found:
        fault = f"no checkpoint of {name} was evaluated"
        raise JobError(Problem("--best", fault, "set train.eval_every_steps and checkpoint.best, or name a step"))
    return f"{store.url.rstrip('/')}/{step_folder(name, found[0])}"


def export(
    run: str,
    target: str,
    *,
    dtype: str | None = None,
    shard_gb: float = 5.0,
    adapter: bool = False,
    merged: bool = False,
    best: bool = False,
    tokenizer: str | None = None,
    trust: bool = False,
    progress: Callable[[int], None] = lambda _bytes: None,
    say: Say = lambda _remark: None,
) -> dict[str, Any]:
    """Writes a checkpoint as a Hugging Face model.

    Args:
        run: RUN, URL/NAME or URL/NAME/step-N.
        target: A directory or a store's URL.
        dtype: Of the exported tensors, fp32, bf16 or fp16; None: as saved.
        shard_gb: Largest size of a file.
        adapter, merged: Of a run with adapters: these in PEFT's format, or the whole model.
        best: The checkpoint with the least loss on the held-out part, in place of the newest.
        tokenizer: The tokenizer to write; None: that of the run's data.
        trust: Whether files of this machine that the run's job names are read, whoever wrote it.
        progress, say: Get the bytes of each part that is written, and remarks.

    Returns:
        What `raypp checkpoints export --json` prints.

    Raises:
        JobError: There is no such run or step, or the target holds a model already.
        CheckpointError: The checkpoint cannot be read.
    """
    store, commit, _ = open_checkpoint(best_checkpoint(run) if best else run, say)
    commit = replace(commit, job=guarded(commit.job, trust=trust))
    options = saved_options(store, commit)
    _check_form(options.lora, commit, adapter, merged, dtype)
    lend_store_settings()
    with open_for_others(target) as there:
        _check_empty(there)
        try:
            job = read_job(store, commit.run, trust=trust)
        except CheckpointError:
            job = None
        if adapter:
            base = (options.from_hf or "").removeprefix(NOT_YOURS)  # is named, not read
            done = export_adapter(store, commit, there, base=base, job=job, tokenizer=tokenizer, progress=progress)
        else:
            done = export_hf(
                store,
                commit,
                there,
                dtype=DTYPES[dtype] if dtype else None,
                shard_bytes=max(1, int(shard_gb * 1e9)),
                job=job,
                tokenizer=tokenizer,
                progress=progress,
            )
    for remark in done.remarks:
        say(f"note: {remark}")
    return {"run": commit.run, "step": commit.step, "target": there.url, **asdict(done)}


def _check_form(lora: LoraOptions | None, commit: Commit, adapter: bool, merged: bool, dtype: str | None) -> None:
    """Checks that the options fit what the run trained."""
    if lora is None and (adapter or merged):
        flag = "--adapter" if adapter else "--merged"
        raise JobError(Problem(flag, f"{commit.run} trained all weights and has no adapters", f"leave out {flag}"))
    if lora is not None and adapter == merged:
        fault = f"{commit.run} trained adapters (model.lora)" + (": it cannot be both" if merged else "")
        fix = "use --adapter for PEFT, or --merged for a whole model"
        raise JobError(Problem("--adapter", fault, fix))
    if adapter and dtype:
        raise JobError(Problem("--dtype", "adapters are exported in fp32", "leave it out"))


def _check_empty(target: ObjectStore) -> None:
    for info in target.list():
        if "/" not in info.key and (info.key == "config.json" or info.key.endswith((".safetensors", ".index.json"))):
            fault = f"{target.url} already contains a model ({info.key})"
            raise JobError(Problem("DIR_OR_URL", fault, "use another place, or remove the model first"))
