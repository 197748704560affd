"""How pages are written: wrapped at 100 columns, and so that GitHub and the site show the same."""

import re

from markdown_pages import pages, prose

COLUMNS = 100
ITEM = re.compile(r" *(?:[-*]|\d+\.) ")


def too_long(text: str) -> bool:
    """Is a line of prose longer than it may be? Tables, and what URLs make long, may be."""
    if len(text) <= COLUMNS or text.startswith("|"):
        return False
    shorter = re.sub(r"\]\([^)]*\)", "]", re.sub(r"https?://\S+", "", text))
    return len(shorter) > COLUMNS


def test_lines_of_prose_end_before_column_100() -> None:
    assert not [f"{page}:{line.number}" for page in pages() for line in prose(page) if too_long(line.text)]


def test_lists_and_tables_begin_after_a_blank_line() -> None:
    """Without it the site shows them as part of the paragraph."""
    found = []
    for page in pages():
        before = ""
        for line in prose(page):
            text = line.text
            if ITEM.match(text) and before and not ITEM.match(before) and not before.startswith("  "):
                found.append(f"{page}:{line.number} a list")
            if text.startswith("|") and before and not before.startswith("|"):
                found.append(f"{page}:{line.number} a table")
            before = text
    assert not found


def test_a_long_line_is_found_and_a_long_link_is_not() -> None:
    assert too_long("word " * 21)
    assert not too_long("| " + "cell " * 40 + "|")
    assert not too_long("see [this](" + "a" * 90 + ") and that")
