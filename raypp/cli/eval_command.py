"""`raypp eval`: the loss of a trained model on text, or its results on tasks."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from raypp.api.inference import reports_of
from raypp.cli.console import Console, Table
from raypp.cli.options import chosen_cluster, cluster_options, mesh_option, note_paths, set_option, trust_option
from raypp.cli.output import echo, echo_json
from raypp.control.calls import last_answer
from raypp.control.clusters.find import Cluster
from raypp.environment import need
from raypp.errors import JobError, Problem, RayppError
from raypp.job.job import Job
from raypp.state.run_records.status import duration
from raypp.tools.inference.eval_job import DATA, as_asked, data_job, task_job
from raypp.tools.inference.prompts import end_ids
from raypp.tools.inference.source import Source, find_source
from raypp.untrusted.files import expand_home

_KEYS = ("loss", "perplexity", "tokens", "bytes_per_token")


@click.command("eval")
@click.argument("model", metavar="RUN|URL|HF_DIR")
@click.option("--step", type=click.IntRange(0), metavar="N", help="Checkpoint of the run.  [default: the newest]")
@click.option("--data", metavar="PATH", help="Text to evaluate on.  [default: the run's eval data, else its data]")
@click.option("--tasks", metavar="A,B", help="Run tasks of lm-evaluation-harness: names, or paths of their YAML files.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="With --tasks: only the first N documents of each.")
@set_option
@mesh_option
@cluster_options
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def eval_command(
    model: str,
    step: int | None,
    data: str | None,
    tasks: str | None,
    limit: int | None,
    overrides: tuple[str, ...],
    pp: int,
    on_cluster: bool,
    address: str | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Evaluate a trained model: a run, a checkpoint of it, or a Hugging Face folder.

    Computes the loss on text with the rows, lengths and precision of the run's own evaluation. Or,
    with --tasks, runs tasks of lm-evaluation-harness. Needs no cluster: the model runs on this
    machine, unless you ask for a cluster.
    """
    if tasks is not None:
        if not on_cluster and address is None:
            need("lm_eval", "eval", "--tasks")
        if data is not None:
            raise JobError(Problem(DATA, "tasks bring their own data", f"leave out {DATA} or --tasks"))
    elif limit is not None:
        raise JobError(Problem("--limit", "belongs to --tasks", "give --tasks, too"))
    cluster = chosen_cluster(on_cluster, address)
    source = find_source(model, step, trust=trust)
    for remark in source.remarks:
        echo(f"note: {remark}", err=True)
    if tasks is None:
        job = data_job(source, data, pp, overrides)
        if cluster is not None:
            note_paths(cluster, source, job)
        try:
            answer = _asked(cluster, source, job, {}, as_json)
        except RayppError as error:
            raise type(error)(as_asked(error.problems, data)) from error
        _show_loss(source, answer, as_json)
        return
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise JobError(Problem("--tasks", "names no task", "name some, separated by commas"))
    job = task_job(source, pp, overrides)
    names = [str(expand_home(name).absolute()) if _is_file(name) else name for name in names]
    request: dict[str, Any] = {"tasks": names, "limit": limit}
    request |= {"ends": list(end_ids(source, source.open_tokenizer())), "folder": str(Path.cwd())}
    if cluster is not None:
        note_paths(cluster, source, files=[*filter(_is_file, request["tasks"])])
    answer = _asked(cluster, source, job, request, as_json)
    if as_json:
        echo_json(answer)
    else:
        _show_tasks(source, answer)


def _asked(cluster: Cluster | None, source: Source, job: Job, request: dict[str, Any], as_json: bool) -> dict[str, Any]:
    with evaluation_progress(quiet=as_json) as progress:
        return dict(last_answer(reports_of(cluster, "eval", source, job, request), progress))


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _show_loss(source: Source, answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        echo_json({key: answer[key] for key in _KEYS})
        return
    facts = [f"loss {answer['loss']:.4f}"]
    if answer["perplexity"] is not None:
        facts.append(f"perplexity {answer['perplexity']:.4g}")
    facts.append(f"{answer['tokens']:,} tokens")
    if answer["bytes_per_token"] is not None:
        facts.append(f"{answer['bytes_per_token']:.3g} bytes per token")
    echo(f"{source.place}: {', '.join(facts)}; {answer['seconds']:.1f} s")


def _show_tasks(source: Source, answer: dict[str, Any]) -> None:
    echo(source.place)
    table = Table("task", "metric", "value", "±", right=("value", "±"))
    for task, metrics in answer["tasks"].items():
        for metric, value in metrics.items():
            if "_stderr" not in metric and isinstance(value, int | float):
                name, _, chosen = metric.partition(",")
                error = metrics.get(f"{name}_stderr,{chosen}")
                shown = f"{error:.4f}" if isinstance(error, int | float) else ""
                table.add_row(task, metric.removesuffix(",none"), f"{value:.4f}", shown)
    Console().print(table)


_FIRST_LINE_S, _LINE_EVERY_S = 5.0, 30.0

Update = Callable[[Mapping[str, Any]], None]


@contextmanager
def evaluation_progress(*, quiet: bool) -> Iterator[Update]:
    """Shows the progress of an evaluation and the time left: on a terminal a bar that disappears at
    the end, elsewhere a line every 30 s, first after 5 s. `quiet`: show nothing unless stderr is a
    terminal. Yields a function that takes `done`, `total` and `unit` (`tokens` or `rows`)."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield (lambda _report: None) if quiet else _Lines(time.monotonic).update
        return
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[words]}", markup=False), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("evaluating", total=None, words="")
        yield lambda report: progress.update(
            task, completed=report["done"], total=report["total"], words=_count_in_words(report)
        )


def _count_in_words(report: Mapping[str, Any]) -> str:
    return f"{report['done']:,} of {report['total']:,} {report['unit']}"


class _Lines:
    """Prints progress as lines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._next = self._began + _FIRST_LINE_S
        self._first: tuple[float, int] | None = None

    def update(self, report: Mapping[str, Any]) -> None:
        """Prints a line if one is due."""
        now = self._clock()
        if self._first is None or report["done"] < self._first[1]:
            self._first = now, report["done"]  # without the time that loading took
        if now < self._next:
            return
        self._next = now + _LINE_EVERY_S
        since, before = self._first
        left = ""
        if report["done"] > before:
            seconds = (now - since) * (report["total"] - report["done"]) / (report["done"] - before)
            left = f", {duration(seconds)} left"
        echo(f"evaluating: {_count_in_words(report)}{left}", err=True)
