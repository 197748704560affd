"""Loads a job, runs every check that needs no cluster, and plans what it will cost."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from raypp.api.torch_process import ask
from raypp.control.recovery.policy import check_policy
from raypp.errors import DataError, JobError, Problem, RayppError, RunFailedError
from raypp.job.checks import check_spec
from raypp.job.job import DataSection, Job
from raypp.job.job_file import IncompleteJobError, JobFile, in_order, job_file, load_job
from raypp.job.load import job_document
from raypp.job.lora import quantised_base
from raypp.job.paths import is_remote
from raypp.job.precision import GROUPS_FP8, SINCE_FP8
from raypp.kinds import SOURCES
from raypp.planning.check import check_plan
from raypp.planning.costs import device_named
from raypp.planning.decide import settle
from raypp.planning.decision import Facts, Kind
from raypp.planning.machines import read_machines
from raypp.planning.measured_costs import read_costs
from raypp.planning.plan import Grounds, Plan, make_plan
from raypp.planning.sizes import count, not_counted, sizes_remark
from raypp.state.checkpoint.known_jobs import named_by
from raypp.state.checkpoint.layout import step_folder

_log = logging.getLogger("raypp")


def load_checked_job(path: str | Path, overrides: Sequence[str] = ()) -> JobFile:
    """Loads a job file and checks the job, its mesh, its cut, its schedule and its recovery policy.
    Looks at the first rows of local data, if their source can check them. Raises JobError: all
    problems, each with its location (`job.yaml:14`, `--set mesh.pp=4`)."""
    try:
        return checked(load_job(path, overrides))
    except IncompleteJobError as error:
        if error.rest is None:
            raise
        return checked(error.rest, error.problems)


def checked(file: JobFile, before: Sequence[Problem] = ()) -> JobFile:
    """Runs the checks of `load_checked_job` on a job that is loaded already. `before`: problems of
    its file that are known. Raises JobError: all problems, those that are known among them."""
    _say_what_others_named(file)
    problems = list(before)
    try:
        file = sized(file)
    except RayppError as error:
        # Without sizes there is no plan, and whether the data fit the model is unknown.
        problems += [problem for problem in _spec_problems(file, problems) if problem.key.partition(".")[0] != "model"]
        if not problems and not isinstance(error, JobError):
            raise
        raise JobError(in_order([*map(file.locate, problems), *error.problems])) from error
    problems += _job_problems(file, problems)
    problems = problems or _row_problems(file.job)
    if not problems and file.job.train.epochs is not None:
        from raypp.rank.data.loader import with_steps  # imports NumPy

        job, words = with_steps(file.job)
        file = replace(file, job=job, remarks=(*file.remarks, words))
        problems = _job_problems(file, ())  # of the steps
    if problems:
        raise JobError(in_order(file.locate(problem) for problem in problems))
    for remark in (*file.remarks, *_remarks(file.job)):
        _log.warning("note: %s", remark)
    return file


def _say_what_others_named(file: JobFile) -> None:
    """Says which code a file runs and what it names outside of its folder, before that is used:
    somebody else may have written it. What `--set` names, the user did."""
    folder = os.path.realpath(file.directory)
    named = named_by(job_document(file.job)) if file.where else []
    if ("checkpoint", "url") in file.where:
        named.append(("checkpoint.url", file.job.checkpoint.url))
    for key, value in named:
        where = file.locate(Problem(key, "")).where
        if where.startswith("--set"):
            continue
        if key.endswith(("kind", "schedule", "policy")) and not value.endswith(".csv"):
            _log.warning("note: %s: %s is own code, which runs on this machine and on the nodes: %s", where, key, value)
        elif not is_remote(value) and not Path(os.path.realpath(value)).is_relative_to(folder):
            _log.warning("note: %s: %s is outside of the file's folder: %s", where, key, value)


def _remarks(job: Job) -> Iterator[str]:
    """Yields what is allowed, and rarely meant."""
    warm_up, steps = job.train.warmup_steps, job.train.steps
    if warm_up > steps:
        reached = f"the learning rate reaches {job.train.learning_rate(steps):.3g} of {job.train.optimizer.lr:g}"
        yield f"train.lr_schedule.warmup_steps: {warm_up:,} is longer than the run of {steps:,} steps: {reached}"
    if SOURCES.get(job.data.kind).endings and not _is_one_pass(job):
        from raypp.rank.data.loader import passes_of_small_data  # imports NumPy

        yield from filter(None, [passes_of_small_data(job)])


def _is_one_pass(job: Job) -> bool:
    """Whether a run surely takes no row twice: a plain text has a token for each byte, and a row at
    most `seq_len` of them."""
    data = job.data
    if (data.kind, data.tokenizer) != ("text", "bytes") or data.path is None or not Path(data.path).is_file():
        return False
    return job.train.steps * job.rows_per_step * data.seq_len <= Path(data.path).stat().st_size


def _job_problems(file: JobFile, before: Sequence[Problem]) -> list[Problem]:
    """Returns the problems of the job, each once: without plan problems that follow from others, as
    of a schedule that cannot be imported. Without `resources.device`, they are those of a device
    that the job may run on, with `train.precision: auto` also of the other. Submission knows the
    device, and checks again."""
    asked = file.job
    if asked.resources.device != "auto":
        return _problems_on(asked.resources.device, file, before)
    problems = _problems_on("cuda", file, before)
    on_cpus = _problems_on("cpu", file, before) if problems and asked.train.precision == "auto" else problems
    return min(problems, on_cpus, key=len)


def _problems_on(device: Kind, file: JobFile, before: Sequence[Problem]) -> list[Problem]:
    file = replace(file, job=settle(file.job, Facts(device)))
    problems = _spec_problems(file, before)
    reported = {problem.key for problem in (*before, *problems)}
    try:
        found: Sequence[Problem] = check_plan(file.job)
    except JobError as error:
        found = error.problems
    return problems + [one for one in found if one.key not in reported and (one.key or not reported)]


def _spec_problems(file: JobFile, before: Sequence[Problem]) -> list[Problem]:
    """Returns the problems of the job on its own, without those of keys that have one already."""
    reported = {problem.key for problem in before}
    problems = [problem for problem in check_spec(file.job, file.directory) if problem.key not in reported]
    reported |= {problem.key for problem in problems}
    return problems + [problem for problem in check_policy(file.job.recovery) if problem.key not in reported]


def _row_problems(job: Job) -> list[Problem]:
    """Returns the problems of the first rows of local data, and of a tokenizer for the model."""
    source, parts = SOURCES.get(job.data.kind), job.data.parts or []
    if source.mixes and all(part.epochs is not None or part.tokens is not None for part in parts):
        from raypp.rank.data.loader import check_budgets

        return check_budgets(job)
    kinds = [SOURCES.get(part.kind) for part in parts] if source.mixes else [source]
    in_file = job.data.tokenizer != "bytes" and any(kind.ids == "text" for kind in kinds)
    if not in_file and not any(kind.first_rows for kind in kinds):
        return _format_problems(job.data)
    from raypp.rank.data.sources import check_data

    return check_data(job)


def _format_problems(data: DataSection) -> list[Problem]:
    """Returns the problems of local files whose ending is that of another kind of data."""
    from raypp.rank.data.source_files import check_format

    problems: list[Problem] = []
    for key, source in data.all_sources():
        endings = SOURCES.get(source.kind).endings
        if source.path is not None and endings and Path(source.path).is_file():
            try:
                check_format(source.path, endings, f"{key}.path")
            except DataError as error:
                problems += error.problems
    return problems


def sized(file: JobFile) -> JobFile:
    """Returns the job with the sizes of the model that `model.from_hf` or `model.from_run` names,
    and rows for `data.added_tokens`."""
    if (given := file.job.model.from_run) is not None:
        from raypp.control.find_run import open_run
        from raypp.state.checkpoint.from_run import with_run_model

        store, run, step = open_run(given)
        location = f"{store.url}/{run if step is None else step_folder(run, step)}"
        model = file.job.model.model_copy(update={"from_run": location})
        file = with_run_model(replace(file, job=file.job.model_copy(update={"model": model})))
    if file.job.model.from_hf is not None:
        from raypp.state.hf.from_hf import with_hf_sizes

        if is_remote(file.job.model.from_hf):
            from raypp.control.clusters.find import lend_store_settings

            lend_store_settings()
        file = with_hf_sizes(file)
    if file.job.data.added_tokens:
        from raypp.rank.data.added_tokens import with_rows  # imports NumPy

        file = with_rows(file)
    return file


def plan(
    job: Job,
    *,
    device: str | None = None,
    link_gbps: float | None = None,
    links: str | Path | None = None,
    per_node: int | None = None,
    inside_gbps: float | None = None,
    costs: str | Path | None = None,
) -> Plan:
    """Plans a job.

    Args:
        device: Kind of device, such as rtx4090; None: what the job says.
        link_gbps: Rate between any two nodes, in Gbit/s, shared by the devices of a node.
        links: A file of nodes and links, from `raypp doctor --out`.
        per_node: Devices per node.
        inside_gbps: Rate between two devices of a node, in Gbit/s; None: that of the device.
        costs: A file of measured costs, from `raypp plan --measure`.

    Raises:
        JobError: All problems of the job; or the device is unknown, or a file cannot be used.
    """
    job = checked(job_file(job)).job
    count_own_model(job)
    grounds = grounds_of(
        job, device=device, link_gbps=link_gbps, links=links, per_node=per_node, costs=costs, inside_gbps=inside_gbps
    )
    return make_plan(job, grounds)


def grounds_of(
    job: Job,
    *,
    device: str | None,
    link_gbps: float | None,
    links: str | Path | None,
    per_node: int | None,
    costs: str | Path | None,
    inside_gbps: float | None = None,
) -> Grounds:
    """Collects what `plan` is told about machines and costs. Raises JobError: a file cannot be
    used, the device is unknown or lacks the job's precision, links are given twice, or a node is
    slower inside than its link for each of its devices."""
    if inside_gbps is not None and link_gbps is not None and inside_gbps < link_gbps / (per_node or 1):
        of = f"{link_gbps / (per_node or 1):g} Gbit/s of the node's link for each of its devices"
        raise JobError(f"--inside-gbps {inside_gbps:g} is less than the {of}", "give both in Gbit/s per direction")
    if links is not None and (link_gbps is not None or per_node is not None):
        raise JobError("--links already describes nodes and links", "leave out --link-gbps and --per-node")
    named = device_named(device) if device is not None else None
    if named is not None and job.train.precision != "auto" and not named.computes(job.train.precision):
        dtypes, has = job.train.dtypes, named.capability
        needs = f"{dtypes.name} needs {dtypes.since[0]}.{dtypes.since[1]} or newer"
        fault = f"a {named.name} has compute capability {has[0]}.{has[1]}; {needs}"
        fix = f"use auto, which is {named.facts.precision} there, or another --device"
        raise JobError(Problem("train.precision", fault, fix))
    if named is not None and job.train.fp8.experts and named.kind == "cuda" and named.capability != GROUPS_FP8:
        fault = f"true, but a {named.name} has no products in fp8 of all experts at once: those need 9.0 (h100, h200)"
        raise JobError(Problem("train.fp8.experts", fault, "use false, or another --device"))
    if named is not None and quantised_base(job.model) == "fp8" and not named.computes("fp8"):
        since = ".".join(map(str, SINCE_FP8))
        fault = f"a {named.name} has no products in fp8: those need compute capability {since} or newer"
        raise JobError(Problem("model.lora.base", fault, "use int8 or nf4, or another --device"))
    return Grounds(
        machines=read_machines(Path(links)) if links is not None else None,
        costs=read_costs(Path(costs), job) if costs is not None else None,
        device=named.name if named is not None else None,
        link_gbps=link_gbps,
        per_node=per_node,
        inside_gbps=inside_gbps,
    )


def count_own_model(job: Job) -> str:
    """Counts a user's own model in a process that may import torch; notes and returns faults."""
    if sizes_remark(job.model) is None:
        return ""
    try:
        count(job.model, ask("raypp.tools.built_sizes", {"job": job_document(job)}, "building the model"))
    except RunFailedError as error:
        why = "; ".join(problem.fault for problem in error.problems)
        not_counted(job.model, why)
        return why
    return ""
