"""How exceptions are shown to people."""

from raypp.errors import DataError, Problem, in_words


def test_only_errors_for_users_speak_for_themselves() -> None:
    assert in_words(DataError(Problem("data.path", "no file"))) == "data.path: no file"
    assert in_words(KeyError(0)) == "KeyError: 0"
    assert in_words(RuntimeError()) == "RuntimeError"
