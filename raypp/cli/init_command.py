"""`raypp init`: writes an example job and the files that it needs."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import BinaryIO

import click

from raypp.cli.output import echo
from raypp.errors import JobError, Problem

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
    found = [f"{name}.yaml"]
    names = (("data", "path"), ("data", "tokenizer"), ("data", "chat_template"), ("model", "from_hf"))
    values = [job.get(section, {}).get(key, "") for section, key in names]
    for named in map(str, [*values, *(part.get("path", "") for part in job.get("data", {}).get("parts", []))]):
        place = TEMPLATES / named
        if named and place.is_dir():
            found += sorted(path.relative_to(TEMPLATES).as_posix() for path in place.rglob("*") if path.is_file())
        elif named and place.is_file():
            found.append(named)
    for section, key in (("model", "kind"), ("pipeline", "schedule")):
        module, colon, _ = str(job.get(section, {}).get(key, "")).partition(":")
        if colon and (TEMPLATES / f"{module}.py").is_file():
            found.append(f"{module}.py")
    return found


def write(name: str, job: Path) -> list[Path]:
    """Copies a template to a file, and its other files to that folder; leaves equal ones.

    Returns:
        The paths of the files that were written.

    Raises:
        JobError: A file already exists with different content, so none is written; or a file cannot
            be written.
    """
    sources = {job if path == f"{name}.yaml" else job.parent / path: TEMPLATES / path for path in files_of(name)}
    contents = {path: source.read_bytes() for path, source in sources.items()}
    there = [path for path in contents if path.exists()]
    if job in there:
        fix = "move it away, work in another directory, or name another file with --out"
        raise JobError(Problem("", f"{job} is already here", fix))
    other = [str(path) for path in there if not _holds(path, contents[path])]
    if other:
        what = f"{', '.join(other)} {'is' if len(other) == 1 else 'are'} already here with different content"
        raise JobError(Problem("", what, "move it away, or work in another directory"))
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


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _text(name: str) -> str:
    return (TEMPLATES / f"{name}.yaml").read_text(encoding="utf-8")
