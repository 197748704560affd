"""A hook of `properdocs`: the pages outside of docs/ join the site, and links between the two are
followed.

Links in the pages are those of the repository, so that they work where the repository is browsed.
On the site a page outside of docs/ is below `repository/`. A link to a file that is no page becomes
the file's name. `<!-- files -->` on a package's page becomes the table of its modules, with the
first paragraphs of their docstrings.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from properdocs.structure.files import File

REPOSITORY = Path(__file__).parents[1]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "cluster/kuberay/README.md", "cluster/s3/README.md")
PREFIX = "repository/"
FILES = "<!-- files -->"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    for name in OUTSIDE:
        content = (REPOSITORY / name).read_text(encoding="utf-8")
        files.append(File.generated(config, PREFIX + name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = PurePosixPath(in_repository(page.file.src_uri))
    if FILES in markdown:
        markdown = markdown.replace(FILES, table_of_files(package_of(here.stem)))
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)
    return "".join(
        part if part.startswith("```") else LINK.sub(lambda found: link(found, here), part) for part in parts
    )


def package_of(page: str) -> Path:
    """Returns the room or the package inside a room whose page this is."""
    (package,) = {path.parent for path in (REPOSITORY / "raypp").rglob(f"{page}/__init__.py")}
    return package


def table_of_files(package: Path) -> str:
    """Returns the modules of a package, with what the first paragraphs of their docstrings say.
    Packages inside that have pages of their own are left out."""
    rows = ["| file | what it is for |", "|---|---|"]
    for path in sorted(package.rglob("*.py")):
        own_pages = [part for part in path.relative_to(package).parts[:-1] if (REPOSITORY / f"docs/{part}.md").exists()]
        if path.name not in ("__init__.py", "__main__.py") and not own_pages:
            about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            first = " ".join(about.split("\n\n")[0].split()).replace("|", "\\|")
            rows.append(f"| `{path.relative_to(package)}` | {first} |")
    return "\n".join(rows)


def in_repository(uri: str) -> str:
    """Returns where a page of the site is in the repository."""
    return uri.removeprefix(PREFIX) if uri.startswith(PREFIX) else f"docs/{uri}"


def site_place(name: str) -> str | None:
    """Returns where a file of the repository is on the site; None when it is not there."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return PREFIX + name if name in OUTSIDE else None


def link(found: re.Match[str], here: PurePosixPath) -> str:
    image, text, target = found[1], found[2], found[3]
    place, hash_sign, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target) or not place:
        return found[0]
    name = os.path.normpath(here.parent / place)
    there, start = site_place(name), site_place(str(here))
    if there is None or start is None:
        return text if text.startswith("`") else f"{text} (`{name}`)"
    return f"{image}[{text}]({os.path.relpath(there, PurePosixPath(start).parent)}{hash_sign}{anchor})"
