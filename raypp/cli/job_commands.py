"""Example jobs (`raypp init`), and the job language: explain, schema, list-kinds."""

import difflib
import shutil
import textwrap
from pathlib import Path
from typing import BinaryIO

import click

from raypp.cli.output import echo, echo_json, echo_lines, styled
from raypp.errors import JobError, Problem


@click.command("explain")
@click.argument("section", required=False)
def explain_command(section: str | None) -> None:
    """Explain the job file, one SECTION (pipeline.wire) or one key (mesh.pp)."""
    from raypp.job.explain import explain

    columns = shutil.get_terminal_size((88, 24)).columns
    echo_lines(explain(section, width=max(50, min(columns, 100))), nl=False)


@click.command("schema")
def schema_command() -> None:
    """Print the job file's JSON Schema.

    Editors with yaml-language-server check and complete a job file that begins with

    \b
        # yaml-language-server: $schema=raypp.schema.json

    after `raypp schema > raypp.schema.json`.
    """
    from raypp.job.explain import schema

    echo_json(schema(), indent=2)


@click.command("list-kinds")
@click.argument("key", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_kinds_command(key: str | None, as_json: bool) -> None:
    """List the models, data sources, schedules, optimizers, policies, trackers and stores.

    With KEY (model.kind), list only the kinds of that key.
    """
    from raypp.job.availability import CHOICES, Choice
    from raypp.kinds import STORES

    every = CHOICES | {"checkpoint.url": Choice(STORES)}
    if key is not None and key not in every:
        matching = [known for known in every if known.startswith(key)]
        if len(matching) != 1:
            raise JobError(f"{key!r} is not a key with kinds", f"use one of {', '.join(every)}")
        key = matching[0]
    kinds = {
        name: [(kind.name, kind.available, kind.summary) for kind in choice.kinds()]
        for name, choice in every.items()
        if key in (None, name)
    }
    if as_json:
        document = {
            name: [{"name": kind, "available": ready, "summary": summary} for kind, ready, summary in rows]
            for name, rows in kinds.items()
        }
        echo_json(document, indent=2)
        return
    columns = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for position, (name, rows) in enumerate(kinds.items()):
        if position:
            echo()
        echo(styled(name, bold=True))
        longest = max(len(kind) for kind, _, _ in rows)
        for kind, ready, summary in rows:
            text = summary if ready else f"not available yet: {summary}"
            first, later = f"  {kind:<{longest}}  ", " " * (longest + 4)
            row = textwrap.fill(text, columns, initial_indent=first, subsequent_indent=later)
            echo_lines(row if ready else styled(row, dim=True))


TEMPLATES = Path(__file__).parents[1] / "templates"
"""The example jobs of this version; `jobs/` in the repository is a link to it."""


@click.command("init")
@click.argument("template", required=False)
@click.option("--out", metavar="FILE", help="Write the job to this file, and what it needs beside it.")
def init_command(template: str | None, out: str | None) -> None:
    """Write the example job TEMPLATE and the data it needs into the current directory.

    Without TEMPLATE, list what there is.
    """
    names = template_names()
    if template is None:
        longest = max(map(len, names))
        for name in names:
            echo(f"{name:<{longest}}  {summary(name)}")
        echo()
        echo("write one into this directory: raypp init TEMPLATE")
        return
    name = template.removesuffix(".yaml")
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise JobError(f"there is no template {template!r}", f"{hint}`raypp init` lists them: {', '.join(names)}")
    file = Path(out or f"{name}.yaml")
    for path in write(name, file):
        echo(f"wrote {path}")
    echo()
    echo(f"the first lines of {file} say who it is for, what it needs, and what to type")


def template_names() -> list[str]:
    """Returns the names of all templates; quickstart is the first."""
    return sorted((path.stem for path in TEMPLATES.glob("*.yaml")), key=lambda name: (name != "quickstart", name))


def summary(name: str) -> str:
    """Returns the first line of a template."""
    return _text(name).partition("\n")[0].removeprefix("# ")


def files_of(name: str) -> list[str]:
    """Returns the paths of a template and the files it names, within the folder of templates."""
    import yaml

    job = yaml.safe_load(_text(name))
    files = [f"{name}.yaml"]
    names = (("data", "path"), ("data", "tokenizer"), ("data", "chat_template"), ("model", "from_hf"))
    values = [job.get(section, {}).get(key, "") for section, key in names]
    for named in map(str, [*values, *(part.get("path", "") for part in job.get("data", {}).get("parts", []))]):
        place = TEMPLATES / named
        if named and place.is_dir():
            files += sorted(path.relative_to(TEMPLATES).as_posix() for path in place.rglob("*") if path.is_file())
        elif named and place.is_file():
            files.append(named)
    for section, key in (("model", "kind"), ("pipeline", "schedule")):
        module, colon, _ = str(job.get(section, {}).get(key, "")).partition(":")
        if colon and (TEMPLATES / f"{module}.py").is_file():
            files.append(f"{module}.py")
    return files


def write(name: str, job: Path) -> list[Path]:
    """Copies a template to a file, and its other files to that folder; leaves equal ones. Returns
    the paths of the files that were written. Raises JobError: a file already exists with different
    content, so none is written; or a file cannot be written."""
    sources = {job if path == f"{name}.yaml" else job.parent / path: TEMPLATES / path for path in files_of(name)}
    contents = {path: source.read_bytes() for path, source in sources.items()}
    there = [path for path in contents if path.exists()]
    if job in there:
        fix = "move it away, work in another directory, or name another file with --out"
        raise JobError(Problem("", f"{job} is already here", fix))
    other = [str(path) for path in there if not path.is_file() or path.read_bytes() != contents[path]]
    if other:
        fault = f"{', '.join(other)} {'is' if len(other) == 1 else 'are'} already here with different content"
        raise JobError(Problem("", fault, "move it away, or work in another directory"))
    missing = [path for path in contents if path not in there]
    for path in missing:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                _fill(file, contents[path])
        except OSError as error:
            fix = "run raypp init in a directory that you can write to"
            raise JobError(Problem("", f"{path} cannot be written: {error.strerror}", fix)) from error
    return missing


def _fill(file: BinaryIO, content: bytes) -> None:
    """Writes a new file; removes it if the disk is full."""
    try:
        file.write(content)
        file.flush()
    except OSError:
        Path(file.name).unlink()
        raise


def _text(name: str) -> str:
    return (TEMPLATES / f"{name}.yaml").read_text(encoding="utf-8")
