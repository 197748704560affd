"""Every relative link of every page leads to a file that is there, every anchor to a heading."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from markdown_pages import REPOSITORY, anchors, pages, prose

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()]*\))?)(?: \"[^\"]*\")?\)")


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Yields a page's relative links, which may go over two lines, with the line each ends on."""
    numbers, texts = zip(*((line.number, re.sub(r"`[^`]*`", "", line.text)) for line in prose(page)), strict=True)
    text = "\n".join(texts)
    for match in LINK.finditer(text):
        if not re.match(r"[a-z]+:", match[1]):
            yield numbers[text.count("\n", 0, match.end())], match[1]


def broken(page: Path) -> list[str]:
    """Returns what is wrong with the relative links of a page, one line for each."""
    found = []
    for number, target in links(page):
        place, _, anchor = unquote(target).partition("#")
        path = (REPOSITORY / page.parent / place).resolve() if place else REPOSITORY / page
        if not path.is_relative_to(REPOSITORY) or not path.exists():
            found.append(f"{page}:{number} there is no {target}")
        elif path.is_dir():
            found.append(f"{page}:{number} {target} is a folder: link to a page in it")
        elif anchor and anchor not in anchors(path.relative_to(REPOSITORY)):
            found.append(f"{page}:{number} {target}: no heading there has this anchor")
    return found


def test_every_link_leads_somewhere() -> None:
    assert not [link for page in pages() for link in broken(page)]


def test_every_page_of_docs_can_be_reached_from_the_index() -> None:
    seen, ahead = set(), [Path("docs/index.md")]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        for _, target in links(page):
            path = (REPOSITORY / page.parent / target.partition("#")[0]).resolve()
            if path.suffix == ".md" and path.is_file() and path.is_relative_to(REPOSITORY):
                ahead += {path.relative_to(REPOSITORY)} - seen
    assert {page for page in pages() if page.parts[0] == "docs"} <= seen


def test_a_link_to_nothing_and_an_anchor_of_no_heading_are_found() -> None:
    found = LINK.findall("see [a `b`](nowhere.md), [c](index.md#nothing) and ![d](d.svg)")
    assert found == ["nowhere.md", "index.md#nothing", "d.svg"]
    assert "nothing" not in anchors(Path("docs/index.md")) and "try-it" in anchors(Path("docs/index.md"))
