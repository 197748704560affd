"""Why a controller could not be started, read from what Ray says of an actor's end."""

from __future__ import annotations

import pytest

from raypp.control.driver import why_no_controller

_HEAD = (
    "The actor died because of an error raised in its creation task, "
    "\x1b[36mray::raypp/a:Controller.__init__()\x1b[39m (pid=7, ip=10.0.0.1, actor_id=ab, repr=raypp/a)\n"
    '  File "/somewhere/raypp/control/controller.py", line 44, in __init__\n'
    "    self._leader = Leader(request)\n"
    "                   ^^^^^^^^^^^^^^^\n"
)


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (
            "raypp.errors.JobError: checkpoint.url: is empty\n  fix: use s3://",
            "checkpoint.url: is empty\n  fix: use s3://",
            2,
        ),
        ("raypp.storage.store.StoreError: no answer", "no answer", 3),
        ("raypp.errors.Problem: not an error", "raypp.errors.Problem: not an error", 1),
        ("raypp.not_there.JobError: x", "raypp.not_there.JobError: x", 1),
        ("ModuleNotFoundError: No module named 'boto3'", "ModuleNotFoundError: No module named 'boto3'", 1),
        ("KeyError", "KeyError", 1),
    ],
)
def test_an_error_of_the_constructor_is_told_in_its_own_words(error: str, words: str, code: int) -> None:
    assert why_no_controller(f"{_HEAD}{error}\n") == (words, code)


def test_an_end_without_a_traceback_is_told_by_its_last_line() -> None:
    text = "The actor died unexpectedly before finishing this task.\n\tclass_name: Controller\nThe node has died."
    assert why_no_controller(text) == ("The node has died.", 1)
    assert why_no_controller("") == ("", 1)
