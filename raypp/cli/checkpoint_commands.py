"""`raypp checkpoints`: list, show, verify, prune, compare; convert to and from Hugging Face."""

import time
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from raypp.api.checked_job import load_checked_job
from raypp.api.checkpoints import DTYPES, export, open_checkpoint
from raypp.cli.console import Lines, Table, Text, progress_bar, wide_console
from raypp.cli.options import trust_option
from raypp.cli.output import echo, echo_json, echo_lines, say, styled
from raypp.control.clusters.find import lend_store_settings
from raypp.control.find_run import open_run
from raypp.errors import EXIT_OK, EXIT_RUN_FAILED, CheckpointError, JobError, Problem, size_text
from raypp.job.load import job_document, parse_job
from raypp.job.models import DecoderOptions
from raypp.job.paths import is_remote
from raypp.state.checkpoint.commit import Commit, read_commit
from raypp.state.checkpoint.diff import Comparison, diff_checkpoints
from raypp.state.checkpoint.known_jobs import remember_job
from raypp.state.checkpoint.layout import split_location, step_folder
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.state.checkpoint.retention import BestOf, find_leftovers, prune, remove_leftovers
from raypp.state.checkpoint.run_spec import read_spec
from raypp.state.checkpoint.saved_tensors import TensorInfo
from raypp.state.checkpoint.tensor_file import OPTIMIZER
from raypp.state.hf.config import OWN_KEYS
from raypp.state.hf.from_hf import hf_options
from raypp.state.hf.import_model import import_hf
from raypp.state.hf.model_files import HfFiles, matching_tensors
from raypp.state.hf.names import model_tensors
from raypp.state.hf.text_config import text_config
from raypp.state.hf.unused_tensors import unused_weights
from raypp.state.run_records.reader import RunReader
from raypp.state.run_records.status import date_and_clock, duration, mesh_text
from raypp.storage import ObjectStore, open_store
from raypp.tools.inference.source import committed_steps, nothing_committed
from raypp.untrusted.files import expand_home
from raypp.untrusted.text import shell_word, visible


@click.group("checkpoints")
def checkpoints_group() -> None:
    """List, show, verify, prune, compare, export and import checkpoints.

    RUN is a run's name, or URL/NAME. Append /step-N for one checkpoint.
    """


@checkpoints_group.command("list")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, oldest first.")
def list_command(run: str, as_json: bool) -> None:
    """List the committed checkpoints of RUN.

    Shows what COMMIT records. `raypp checkpoints verify` reads the data itself.
    """
    store, name, step = open_run(run)
    rows = [_row(store, name, committed) for committed in committed_steps(store, name, step)]
    if as_json:
        echo_json(rows)
    elif not rows:
        echo(f"{name} has no committed checkpoint in {store.url}")
    else:
        console = wide_console()
        console.print(_table(rows))
        console.print(f"in {store.url}/{name}", style="dim")


@checkpoints_group.command("verify")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, oldest first.")
def verify_command(run: str, as_json: bool) -> None:
    """Read RUN's checkpoints in full and compare every byte with what was committed.

    If an object is missing, torn or corrupt, prints its name and exits with code 1.
    """
    store, name, step = open_run(run)
    steps = committed_steps(store, name, step)
    if not steps:
        raise nothing_committed(store, name)
    results: list[dict[str, Any]] = []
    for step in steps:
        size, started = _size(store, name, step), time.monotonic()
        with progress_bar(f"step {step}", size) as advance:
            problems = verify_checkpoint(store, name, step, progress=advance)
        results.append(
            {
                "step": step,
                "checkpoint": f"{store.url}/{step_folder(name, step)}",
                "ok": not problems,
                "problems": [{"object": problem.key, "problem": problem.fault} for problem in problems],
            }
        )
        if not as_json and problems:
            echo(f"step {step}: unusable", err=True)
            for problem in problems:
                echo(f"  {store.url}/{problem.key}: {problem.fault}", err=True)
        elif not as_json:
            echo(f"step {step}: intact, {size / 1e6:.1f} MB read in {time.monotonic() - started:.1f} s")
    if as_json:
        echo_json(results)
    if not all(result["ok"] for result in results):
        raise SystemExit(EXIT_RUN_FAILED)


@checkpoints_group.command("prune")
@click.argument("run")
@click.option("--keep", type=click.IntRange(1), help="Checkpoints to keep.  [default: the job's checkpoint.keep]")
@click.option(
    "--keep-every",
    type=click.IntRange(0),
    default=None,
    metavar="N",
    help="Also keep steps that are multiples of N. 0: none.  [default: the job's checkpoint.keep_every]",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def prune_command(run: str, keep: int | None, keep_every: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove old checkpoints of RUN, and leftovers of saves that were never committed.

    Reads the newest checkpoint in full first. If it is damaged, nothing is removed.
    """
    store, name, step = open_run(run)
    if step is not None:
        raise JobError(Problem("RUN", "prune takes a run, not a step", f"use {store.url}/{name} with --keep"))
    steps = committed_steps(store, name, None)
    if keep is None or keep_every is None:
        keep, keep_every = _keep_of_job(store, name, keep, keep_every)
    if steps:
        with progress_bar(f"step {steps[-1]}", _size(store, name, steps[-1])) as advance:
            problems = verify_checkpoint(store, name, steps[-1], progress=advance)
        if problems:
            fault = "nothing was removed: an older checkpoint may be the last good one"
            raise CheckpointError([*problems, Problem("", fault, "run `raypp checkpoints verify`")])
    best = BestOf(_best_of_job(store, name), RunReader(store, name).eval_losses())
    pruned = prune(store, name, keep, keep_every=keep_every, best=best, dry_run=dry_run)
    left = find_leftovers(store, name)
    left = replace(left, objects=tuple(info for info in left.objects if info.key not in pruned.objects))
    if not dry_run:
        remove_leftovers(store, name, left)
    if as_json:
        facts = {
            "steps": list(pruned.steps),
            "objects": len(pruned.objects) + len(left.objects),
            "bytes": pruned.size + left.size,
            "uploads": len(left.uploads),
            "under_way": len(left.under_way),
            "dry_run": dry_run,
        }
        echo_json(facts)
        return
    verb = "would remove" if dry_run else "removed"
    gone = ", ".join(str(gone) for gone in pruned.steps) or "none"
    kept = f"the newest {keep}" + (f" and every {keep_every}th step" if keep_every else "")
    echo(f"{verb} {len(pruned.objects)} objects, {pruned.size / 1e6:.1f} MB (steps: {gone}); kept {kept}")
    if left:
        echo(f"{verb} {left}")
    if left.under_way:
        echo(f"kept {len(left.under_way)} uploads of the newest attempt, which may still be in progress")


def _row(store: ObjectStore, name: str, step: int) -> dict[str, Any]:
    place = {"step": step, "checkpoint": f"{store.url}/{step_folder(name, step)}"}
    try:
        commit = read_commit(store, name, step)
    except CheckpointError as error:
        return {**place, "error": error.problems[0].fault}
    return {
        **place,
        "attempt": commit.attempt,
        "mesh": commit.mesh,
        "bytes": commit.size,
        "objects": len(commit.objects),
        "created": commit.created,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    numbers = ("step", "size", "objects", "attempt")
    table = Table(*numbers, "mesh", "written", right=numbers)
    for row in rows:
        if "error" in row:
            table.add_row(str(row["step"]), "–", "–", "–", Lines(f"COMMIT {row['error']}", "red"), "")
            continue
        written = f"{date_and_clock(row['created'])} ({duration(time.time() - row['created'])} ago)"
        size = f"{row['bytes'] / 1e6:.1f} MB"
        table.add_row(str(row["step"]), size, str(row["objects"]), str(row["attempt"]), mesh_text(row["mesh"]), written)
    return table


def _size(store: ObjectStore, name: str, step: int) -> int:
    try:
        return read_commit(store, name, step).size
    except CheckpointError:
        return 0


def _best_of_job(store: ObjectStore, name: str) -> int:
    """Returns how many checkpoints the job keeps for their loss."""
    try:
        best = (read_spec(store, name).get("checkpoint") or {}).get("best") or {}
    except CheckpointError:
        return 0
    keep = best.get("keep") if isinstance(best, dict) else None
    return keep if isinstance(keep, int) else 0


def _keep_of_job(store: ObjectStore, name: str, keep: int | None, keep_every: int | None) -> tuple[int, int]:
    """Returns the given values, else the job's. A job without keep_every keeps no extra steps."""
    try:
        section = read_spec(store, name).get("checkpoint") or {}
        wanted = section.get("keep") if keep is None else keep
        every = section.get("keep_every", 0) if keep_every is None else keep_every
        if type(wanted) is int and wanted > 0 and type(every) is int and every >= 0:
            return wanted, every
        raise CheckpointError("its checkpoint.keep and keep_every are not numbers")
    except CheckpointError:
        if keep is not None:
            return keep, keep_every or 0
        fault = "the store does not contain this run's job, so its checkpoint.keep is unknown"
        raise JobError(Problem("--keep", fault, "give the number to keep: --keep N")) from None


_SHOWN = 20
_WIDEST = 80


@checkpoints_group.command("show")
@click.argument("run")
@click.option("--all", "everything", is_flag=True, help="Include the tensors of the optimizer's state.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with all tensors.")
def show_command(run: str, everything: bool, as_json: bool) -> None:
    """Show the contents of a checkpoint of RUN (the newest, or RUN/step-N): mesh, sizes, tensors.

    Reads and checks headers, but not the tensors' data.
    """
    store, commit, saved = open_checkpoint(run, say)
    tensors = saved.infos
    if as_json:
        echo_json(_facts(store, commit, tensors))
        return
    console = wide_console()
    place = f"{store.url}/{step_folder(commit.run, commit.step)}"
    console.print(Text.assemble((f"{commit.run}, step {commit.step}", "bold"), f"  {place}"))
    facts = f"attempt {commit.attempt}, {mesh_text(commit.mesh)}, written {date_and_clock(commit.created)}, "
    facts += f"{size_text(commit.size)} in {len(commit.objects)} objects"
    console.print(facts)
    shown = [info for info in tensors.values() if everything or not info.name.startswith(OPTIMIZER)]
    _print_tensors(shown)
    left = [info for name, info in tensors.items() if name.startswith(OPTIMIZER)]
    if left and not everything:
        size = size_text(sum(info.bytes for info in left))
        console.print(f"and {len(left)} tensors of the optimizer, {size}: --all shows them", style="dim")


@checkpoints_group.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--no-optimizer", is_flag=True, help="Compare only the model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diff_command(a: str, b: str, no_optimizer: bool, as_json: bool) -> int:
    """Compare two checkpoints, A and B, tensor by tensor. Their meshes may differ.

    Each is RUN, URL/NAME or URL/NAME/step-N; without a step, the newest. Exits with code 0 if all
    bits are equal, else with code 1.
    """
    (store_a, commit_a, tensors_a), (store_b, commit_b, tensors_b) = open_checkpoint(a, say), open_checkpoint(b, say)
    with progress_bar("comparing", commit_a.size) as advance:
        comparison = diff_checkpoints(tensors_a, tensors_b, optimizer=not no_optimizer, progress=advance)
    if as_json:
        facts = {
            "a": f"{store_a.url}/{step_folder(commit_a.run, commit_a.step)}",
            "b": f"{store_b.url}/{step_folder(commit_b.run, commit_b.step)}",
            "same": comparison.same,
            "equal": comparison.equal,
            "only_a": comparison.only_a,
            "only_b": comparison.only_b,
            "other_form": [{"name": a.name, "a": _form(a), "b": _form(b)} for a, b in comparison.other_form],
            "different": [asdict(difference) for difference in comparison.different],
        }
        echo_json(facts)
    else:
        _tell(comparison)
    return EXIT_OK if comparison.same else EXIT_RUN_FAILED


def _facts(store: ObjectStore, commit: Commit, tensors: dict[str, TensorInfo]) -> dict[str, Any]:
    return {
        "run": commit.run,
        "step": commit.step,
        "checkpoint": f"{store.url}/{step_folder(commit.run, commit.step)}",
        "attempt": commit.attempt,
        "mesh": commit.mesh,
        "created": commit.created,
        "bytes": commit.size,
        "data_position": commit.extra.get("data_position"),
        "objects": [{"key": one.key, "bytes": one.size, "rank": one.rank} for one in commit.objects],
        "tensors": [
            {"name": one.name, "dtype": one.dtype, "shape": one.shape, "bytes": one.bytes, "ranks": one.ranks}
            for one in tensors.values()
        ],
    }


def _print_tensors(tensors: list[TensorInfo]) -> None:
    """Prints one line per tensor. There may be tens of thousands: Rich takes a ms for each."""
    rows = [("tensor", "dtype", "shape", "size", "on ranks")]
    for info in tensors:
        shape = " × ".join(map(str, info.shape)) or "scalar"
        rows.append((visible(info.name), info.dtype.lower(), shape, size_text(info.bytes), _ranges(info.ranks)))
    name, kind, form, size, _ = (min(_WIDEST, max(map(len, column))) for column in zip(*rows, strict=True))
    head, *lines = (
        f"{words[0]:<{name}}  {words[1]:<{kind}}  {words[2]:<{form}}  {words[3]:>{size}}  {words[4]}" for words in rows
    )
    echo(styled(head, bold=True))
    echo_lines("\n".join(lines), nl=bool(lines))


def _ranges(ranks: tuple[int, ...]) -> str:
    texts = []
    for _, group in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        texts.append(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}")
    return ", ".join(texts)


def _form(info: TensorInfo) -> dict[str, Any]:
    return {"dtype": info.dtype, "shape": info.shape}


def _tell(comparison: Comparison) -> None:
    console = wide_console()
    for title, names in (("only in A", comparison.only_a), ("only in B", comparison.only_b)):
        if names:
            echo(f"{title}: {', '.join(names[:_SHOWN])}{_more(len(names))}")
    for left, right in comparison.other_form[:_SHOWN]:
        echo(f"{left.name}: {left.dtype} {list(left.shape)} in A, {right.dtype} {list(right.shape)} in B")
    if len(comparison.other_form) > _SHOWN:
        echo(f"…{_more(len(comparison.other_form))}")
    if comparison.different:
        numbers = ("elements", "max |a − b|", "relative")
        table = Table("values differ", *numbers, right=numbers)
        largest = sorted(comparison.different, key=lambda one: (-one.max_rel, -one.max_abs))
        for one in largest[:_SHOWN]:
            table.add_row(one.name, f"{one.elements} of {one.of}", f"{one.max_abs:.3g}", f"{one.max_rel:.3g}")
        console.print(table)
        if len(largest) > _SHOWN:
            echo(f"…{_more(len(largest))}")
    count = len(comparison.different) + len(comparison.only_a) + len(comparison.only_b) + len(comparison.other_form)
    echo(f"{comparison.equal} tensors are bitwise equal, {count} are not")


def _more(count: int) -> str:
    return f" and {count - _SHOWN} more" if count > _SHOWN else ""


@checkpoints_group.command("export")
@click.argument("run")
@click.argument("target", metavar="DIR_OR_URL")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Dtype of the exported tensors.  [default: as saved]")
@click.option(
    "--shard-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Maximum size of one file, in GB.",
)
@click.option("--adapter", is_flag=True, help="For a run with model.lora: write the adapters in PEFT's format.")
@click.option("--merged", is_flag=True, help="For a run with model.lora: write the whole model, with merged adapters.")
@click.option("--best", is_flag=True, help="The checkpoint with the least loss on the held-out part.")
@click.option(
    "--tokenizer",
    metavar="FILE",
    help="The tokenizer to write: bytes, or a tokenizer.json.  [default: that of the run's data]",
)
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export_command(
    run: str,
    target: str,
    dtype: str | None,
    shard_gb: float,
    adapter: bool,
    merged: bool,
    best: bool,
    tokenizer: str | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint of RUN (the newest, or RUN/step-N) as a Hugging Face model.

    Writes safetensors, config.json and the tokenizer with its chat template, as transformers'
    AutoModelForCausalLM and AutoTokenizer load them. Tensors are copied a few rows at a time, and
    every byte read is checked.
    """
    with progress_bar("exporting") as advance:
        done = export(
            run,
            target,
            dtype=dtype,
            shard_gb=shard_gb,
            adapter=adapter,
            merged=merged,
            best=best,
            tokenizer=tokenizer,
            trust=trust,
            progress=advance,
            say=(lambda _remark: None) if as_json else say,
        )
    if as_json:
        echo_json(done)
        return
    size = size_text(done["size"])
    echo(
        f"step {done['step']} of {done['run']}: {done['tensors']} tensors, {size}, "
        f"{len(done['files'])} files in {done['target']}"
    )


@checkpoints_group.command("import")
@click.argument("source", metavar="HF_DIR_OR_URL")
@click.argument("job", metavar="JOB_OR_URL/NAME")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def import_command(source: str, job: str, as_json: bool) -> None:
    """Start a run from the weights of a Hugging Face model, as a committed checkpoint of step 0.

    The run is that of a job file, or URL/NAME. Then `raypp submit JOB --resume` trains it. Reads
    only safetensors. Writes nothing if a tensor does not fit the job's model.
    """
    lend_store_settings()
    files = HfFiles(source)
    store, name, options, document = _run_of_job(files, job) if _is_file(job) else _run_of_place(files, job)
    with progress_bar("importing") as advance:
        commit = import_hf(files, store, name, options, document, progress=advance)
    remember_job(document)
    if unused := unused_weights(files, options):
        echo(f"note: {unused}", err=as_json)
    if as_json:
        place = f"{store.url}/{name}/step-00000000"
        echo_json({"run": name, "step": 0, "checkpoint": place, "bytes": commit.size})
        return
    echo(f"{name}: step 0 is committed in {store.url}/{name}, {size_text(commit.size)} from {files.store.url}")
    echo(f"  train it: raypp submit {shell_word(job) if _is_file(job) else 'JOB'} --resume")


def _is_file(argument: str) -> bool:
    return argument.endswith((".yaml", ".yml", ".json"))


def _run_of_job(files: HfFiles, path: str) -> tuple[ObjectStore, str, DecoderOptions, dict[str, Any]]:
    """Returns the run of a job file. Checks the sizes last, after the errors that name a tensor."""
    file = load_checked_job(Path(path))
    job = file.job
    # Every field counts, including defaults: the job decides, not config.json.
    asked = parse_job(job_document(job)).model
    matching_tensors(files, model_tensors(asked))
    try:
        options = hf_options(asked.model_copy(update={"from_hf": files.store.url}))
        rows = text_config(files.config()).get("vocab_size")
        if options.vocab_size != rows and "vocab_size" not in job.model.model_fields_set:
            fault = f"is {options.vocab_size}, the default, but {files.place('config.json')} says {rows}"
            raise JobError(Problem("model.vocab_size", fault, f"write {rows}, or more"))
    except JobError as error:
        raise JobError(file.locate(problem) for problem in error.problems) from error
    document = job_document(job)
    document["model"]["original"] = options.model_dump(mode="json")["original"]
    return open_store(job.checkpoint.url), job.name, asked, document


def _run_of_place(files: HfFiles, argument: str) -> tuple[ObjectStore, str, DecoderOptions, dict[str, Any]]:
    """Returns the run at URL/NAME. Its job contains only the model."""
    url, name, step = split_location(argument)
    if url is None or step is not None:
        raise JobError(Problem("JOB_OR_URL/NAME", f"{argument!r} is neither", "give a job.yaml, or URL/NAME"))
    options = hf_options(DecoderOptions(from_hf=files.store.url))
    kept = {*OWN_KEYS, "from_hf"} - {"original"}
    model = {key: value for key, value in options.model_dump(mode="json").items() if key not in kept}
    if not is_remote(url):
        url = str(expand_home(url).absolute())
    store = open_store(url)
    return store, name, options, {"name": name, "model": model, "checkpoint": {"url": store.url}}
