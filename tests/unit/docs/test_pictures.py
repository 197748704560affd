"""Pictures that are drawn by a file are what the file draws."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_pages import REPOSITORY

DRAWN = sorted((REPOSITORY / "docs/pictures").glob("*.py"))


@pytest.mark.parametrize("source", DRAWN, ids=lambda path: path.name)
def test_a_picture_is_what_its_source_draws(source: Path) -> None:
    drawn = runpy.run_path(str(source))["picture"]()
    assert source.with_suffix(".svg").read_text(encoding="utf-8") == drawn
    ElementTree.fromstring(drawn)
