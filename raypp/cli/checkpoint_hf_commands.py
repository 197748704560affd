"""`raypp checkpoints export | import`: convert to and from the Hugging Face format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from raypp.api.checked_job import load_checked_job
from raypp.api.checkpoints import DTYPES, export
from raypp.checkpoint.layout import split_location
from raypp.cli.console import progress_bar
from raypp.cli.output import echo, echo_json, say
from raypp.clusters.find import lend_store_settings
from raypp.errors import JobError, Problem
from raypp.hf.config import OWN_KEYS
from raypp.hf.from_hf import hf_options
from raypp.hf.import_model import import_hf
from raypp.hf.model_files import HfFiles, matching_tensors
from raypp.hf.names import model_tensors
from raypp.planning.stored_bytes import size_text
from raypp.spec.load import job_document, parse_job
from raypp.spec.models import DecoderOptions
from raypp.spec.paths import is_remote
from raypp.storage import ObjectStore, open_store
from raypp.untrusted.files import expand_home
from raypp.untrusted.text import shell_word


@click.command("export")
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
@click.option(
    "--tokenizer",
    metavar="FILE",
    help="The tokenizer to write: bytes, or a tokenizer.json.  [default: that of the run's data]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export_command(
    run: str,
    target: str,
    dtype: str | None,
    shard_gb: float,
    adapter: bool,
    merged: bool,
    tokenizer: str | None,
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
            tokenizer=tokenizer,
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


@click.command("import")
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
    if as_json:
        place = f"{store.url}/{name}/step-00000000"
        echo_json({"run": name, "step": 0, "checkpoint": place, "bytes": commit.size})
        return
    echo(f"{name}: step 0 is committed in {store.url}/{name}, {size_text(commit.size)} from {files.store.url}")
    echo(f"  train it: raypp submit {shell_word(job) if _is_file(job) else 'JOB'} --resume")


def _is_file(argument: str) -> bool:
    return argument.endswith((".yaml", ".yml", ".json"))


def _run_of_job(files: HfFiles, path: str) -> tuple[ObjectStore, str, DecoderOptions, dict[str, Any]]:
    """Returns the run of a job file.

    Checks the model's sizes last, after the errors that name a tensor.
    """
    file = load_checked_job(Path(path))
    job = file.job
    # Every field counts, including defaults: the job decides, not config.json.
    asked = parse_job(job_document(job)).model
    matching_tensors(files, model_tensors(asked))
    try:
        options = hf_options(asked.model_copy(update={"from_hf": files.store.url}))
        rows = files.config().get("vocab_size")
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
