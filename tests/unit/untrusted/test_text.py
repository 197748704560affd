import logging
import shlex
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypp.untrusted.text import VisibleFormatter, shell_word, visible, visible_lines


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
        ("a\u200bb\u00adc\u2060\u3164", "a\\u200bb\\xadc\\u2060\\u3164"),
        ("می\u200cخواهم 👩\u200d🔬", "می\u200cخواهم 👩\u200d🔬"),
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


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Cf", "Zl", "Zp", "Cn"])))
def test_a_word_of_a_shell_command_is_that_word(text: str) -> None:
    assert shlex.split(f"raypp status {shell_word(text)}") == ["raypp", "status", visible(text)]


def test_a_word_with_control_characters_stays_one_word() -> None:
    assert shell_word("$(rm)\n'\x1b") == "'$(rm)\\n'\"'\"'\\x1b'"
    assert len(shlex.split(shell_word("a b\n'; rm #"))) == 1


def test_a_record_of_a_log_shows_its_text() -> None:
    record = logging.LogRecord("name", logging.WARNING, "", 1, "told %s", ("a\x1b[2J\nb",), None)
    assert VisibleFormatter().format(record) == "told a\\x1b[2J\n    b"
