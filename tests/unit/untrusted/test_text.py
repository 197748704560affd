from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypp.untrusted.text import visible, visible_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.0 weight", "layers.0 weight"),
        ("ünïcödé 漢字 🚀", "ünïcödé 漢字 🚀"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_lines_stay_where_they_may() -> None:
    assert visible_lines("a\n\tb\r\x1b[1m") == "a\n\tb\\r\\x1b[1m"


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert not [one for one in visible(text) if unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp")]
    assert visible(visible(text)) == visible(text)
