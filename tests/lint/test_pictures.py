"""Pictures that are drawn by a file are what the file draws."""

import runpy
from xml.etree import ElementTree

from markdown_pages import REPOSITORY

DRAWN = sorted((REPOSITORY / "docs/pictures").glob("*.py"))


def test_a_picture_is_what_its_source_draws() -> None:
    assert DRAWN
    for source in DRAWN:
        drawn = runpy.run_path(str(source))["picture"]()
        assert source.with_suffix(".svg").read_text(encoding="utf-8") == drawn
        ElementTree.fromstring(drawn)
