"""`raypp generate`: what it refuses before a process starts, and what it prints."""

import json
from pathlib import Path

import pytest

from raypp.cli.generate_command import _Printer
from raypp.cli.main import run
from raypp.rank.data.tokenizer import ByteTokenizer
from raypp.tools.inference.prompts import Answer, Encoded

TINY = str(Path(__file__).parents[3] / "jobs" / "data" / "tiny-qwen3")


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ([], "--prompt, --prompts, --chat: none is given"),
        (["--prompt", "a", "--prompts", "b"], "--prompt, --prompts, --chat: only one of them can be given"),
        (["--prompt", "a", "--system", "b"], "--system: a prompt is continued as it is"),
        (["--chat", "--json"], "--json: a conversation is not printed as JSON"),
        (["--chat", "--tokenizer", "bytes"], "--chat: is missing: the bytes tokenizer has no chat template"),
        (["--prompt", "a", "--mesh", "fsdp=2"], "--mesh: 'fsdp=2' is not pp=N"),
        (["--prompt", "a", "--mesh", "pp=3"], "pp=3 has more ranks than"),
        (["--prompt", "a", "--temperature", "-1"], "Invalid value for '--temperature'"),
        (["--prompt", "a", "--top-p", "0.5"], "--top-p: temperature 0 always takes the most likely token"),
        (["--prompt", "a" * 257, "--tokenizer", "bytes"], "the context of"),
        (["--prompt", "a"], "has no tokenizer"),
        (["--prompt", "a", "--step", "3"], "which has no steps"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(
    arguments: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", TINY, *arguments]) == 2
    captured = capsys.readouterr()
    assert reported in captured.out + captured.err


def fed(as_json: bool) -> None:
    """Feeds two answers whose tokens come in turns; the second ends first."""
    answers = [Answer(Encoded(text, list(text.encode()), 9)) for text in ("first", "second")]
    printer = _Printer(answers, ByteTokenizer(), as_json)
    for prompt, token, finish in (
        (0, ord("a"), None), (1, 0x1B, None), (0, ord("b"), None), (1, 256, "eos"), (0, ord("c"), "length"),
    ):  # fmt: skip
        answers[prompt].add(token, finish)
        printer.update()


def test_texts_are_printed_in_the_order_of_their_prompts_and_control_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fed(False)
    assert capsys.readouterr().out == "first\nabc\n\nsecond\n\\x1b\n"


def test_json_has_a_line_per_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    fed(True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"prompt": "first", "text": "abc", "tokens": [97, 98, 99], "finish": "length"},
        {"prompt": "second", "text": "\x1b", "tokens": [27], "finish": "eos"},
    ]
