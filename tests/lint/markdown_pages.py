"""The Markdown pages of the repository, as the checks of this folder read them."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FENCE = re.compile(r"^( {0,3})(```+)([^`]*)$")


@cache
def pages() -> tuple[Path, ...]:
    """Returns every Markdown page of the repository, as paths relative to it."""
    folders = ("benchmarks", "cluster", "docs", "jobs", "raypp", "tests")
    found = [*REPOSITORY.glob("*.md"), *(page for folder in folders for page in (REPOSITORY / folder).rglob("*.md"))]
    return tuple(sorted(page.relative_to(REPOSITORY) for page in found))


def guides() -> tuple[Path, ...]:
    """Returns the pages that describe raypp as it is today: all but docs/design."""
    return tuple(page for page in pages() if page.parts[:2] != ("docs", "design"))


@dataclass(frozen=True)
class Line:
    """A line of a page. `fence` is the language of the block it is in, `None` outside of blocks and
    on their fences."""

    number: int
    text: str
    fence: str | None
    is_fence: bool = False


@cache
def lines(page: Path) -> tuple[Line, ...]:
    found, fence = [], None
    for number, text in enumerate((REPOSITORY / page).read_text(encoding="utf-8").splitlines(), 1):
        mark = FENCE.match(text)
        if mark and fence is None:
            fence = mark[3].strip()
            found.append(Line(number, text, None, True))
        elif mark and not mark[3].strip():
            fence = None
            found.append(Line(number, text, None, True))
        else:
            found.append(Line(number, text, fence))
    assert fence is None, f"{page}: a block of code is not closed"
    return tuple(found)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the line its first line is on, and its text."""

    language: str
    number: int
    text: str


def blocks(page: Path) -> Iterator[Block]:
    held: list[Line] = []
    for line in (*lines(page), Line(0, "", None)):
        if line.fence is not None:
            held.append(line)
        elif held:
            yield Block(held[0].fence or "", held[0].number, "\n".join(one.text for one in held) + "\n")
            held = []


def prose(page: Path) -> Iterator[Line]:
    return (line for line in lines(page) if line.fence is None and not line.is_fence)


def github_anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", _plain(heading).lower()).replace(" ", "-")


def site_anchor(heading: str) -> str:
    """Returns the anchor that Python-Markdown, and so the site, gives a heading."""
    ascii_only = unicodedata.normalize("NFKD", _plain(heading)).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def anchors(page: Path) -> set[str]:
    """Returns the anchors that work both on GitHub and on the site."""
    headings = [line.text.lstrip("#").strip() for line in prose(page) if re.match(r"#{1,6} ", line.text)]
    return {github_anchor(one) for one in headings} & {site_anchor(one) for one in headings}


def _plain(heading: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
