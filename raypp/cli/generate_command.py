"""`raypp generate`: text from a trained model."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raypp.cli.output import echo, echo_json, echo_lines, styled
from raypp.errors import JobError, Problem

if TYPE_CHECKING:
    from raypp.data.tokenizer import PromptTokenizer
    from raypp.inference.prompts import Answer, Encoded

_LARGEST_SEED = 2**63 - 1


@click.command("generate")
@click.argument("run", metavar="RUN|URL/NAME|HF_DIR")
@click.option("--prompt", "given", multiple=True, metavar="TEXT", help="A prompt. May be given several times.")
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help='Prompts as JSON lines: {"prompt": "…"}.',
)
@click.option("--chat", is_flag=True, help="Answer lines of the terminal, by the model's chat template.")
@click.option("--step", type=click.IntRange(0), metavar="N", help="Step of the run's checkpoint.  [default: newest]")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Most new tokens of a text.  [default: 128, or to the end of the context]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="T",
    show_default=True,
    help="Divides the logits. 0: always the most likely token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    metavar="P",
    show_default=True,
    help="Draw from the most likely tokens that together have this probability.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, _LARGEST_SEED),
    default=0,
    metavar="S",
    show_default=True,
    help="Seed of the draws.",
)
@click.option("--mesh", metavar="pp=N", default="pp=1", show_default=True, help="Ranks that the layers are split over.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=8,
    metavar="N",
    show_default=True,
    help="Prompts that are decoded together.",
)
@click.option("--tokenizer", metavar="bytes|FILE", help="Tokenizer of a model that has none.  [default: the model's]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt.")
def generate_command(
    run: str,
    given: tuple[str, ...],
    file: Path | None,
    chat: bool,
    step: int | None,
    max_new_tokens: int | None,
    temperature: float,
    top_p: float,
    seed: int,
    mesh: str,
    batch_size: int,
    tokenizer: str | None,
    as_json: bool,
) -> None:
    """Continue prompts with a trained model, on this machine.

    The model is a run (its newest checkpoint, or URL/NAME/step-N), or the folder or S3 URL of a
    Hugging Face model. The tokens are the same for every --mesh.
    """
    # Imported here: `raypp generate --help` is quick.
    from raypp.cli.chat import converse
    from raypp.inference.processes import Generators
    from raypp.inference.prompts import Answer, encode_prompts, end_ids, read_prompts
    from raypp.inference.source import find_source

    pp = _pipeline_ranks(mesh)
    if (count := bool(given) + (file is not None) + chat) != 1:
        what = "none is given" if count == 0 else "only one of them can be given"
        fix = "give one or more --prompt TEXT, or --prompts FILE.jsonl, or --chat"
        raise JobError(Problem("--prompt, --prompts, --chat", what, fix))
    if chat and as_json:
        raise JobError(Problem("--json", "a conversation is not printed as JSON", "leave it out, or use --prompts"))
    if temperature == 0 and top_p < 1:
        raise JobError(Problem("--top-p", "nothing is drawn with temperature 0", "add --temperature 1"))
    texts = list(given) if file is None else read_prompts(file)
    source = find_source(run, step)
    if tokenizer is not None:
        source = replace(source, tokenizer=tokenizer)
    for remark in source.remarks:
        echo(f"note: {remark}", err=True)
    source.job(pp)
    codec = source.open_tokenizer()
    choice: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed}
    if chat:
        source.open_template()  # before processes start
        with Generators(source, pp, end_ids(source, codec), 1) as generators:
            converse(source, codec, generators, max_new_tokens, choice)
        return
    prompts = encode_prompts(source, codec, texts, max_new_tokens)
    answers = [Answer(prompt) for prompt in prompts]
    printer = _Printer(answers, codec, as_json)
    with Generators(source, pp, end_ids(source, codec), batch_size) as generators:
        for new in generators.generate(prompts, **choice):
            answers[new.prompt].add(new.token, new.finish)
            printer.update()


def _pipeline_ranks(mesh: str) -> int:
    """Returns N of `pp=N`.

    Raises:
        JobError: It is something else.
    """
    found = re.fullmatch(r"pp=([1-9][0-9]{0,4})", mesh)
    if found is None:
        raise JobError(Problem("--mesh", f"{mesh!r} is not pp=N", "give the number of pipeline ranks, such as pp=4"))
    return int(found[1])


class _Printer:
    """Prints texts in the order of their prompts: the first that goes on as it comes, whole with
    `--json`."""

    def __init__(self, answers: list[Answer], tokenizer: PromptTokenizer, as_json: bool) -> None:
        self._answers, self._tokenizer, self._as_json = answers, tokenizer, as_json
        self._current = 0
        self._begun = False

    def update(self) -> None:
        """Prints what is new."""
        while self._current < len(self._answers):
            answer = self._answers[self._current]
            if self._as_json:
                if answer.finish is None:
                    return
                echo_json(
                    {
                        "prompt": answer.prompt.text,
                        "text": answer.text(self._tokenizer),
                        "tokens": answer.tokens,
                        "finish": answer.finish,
                    }
                )
            else:
                self._show(answer)
                if answer.finish is None:
                    return
                echo_lines("")
            self._current, self._begun = self._current + 1, False
            sys.stdout.flush()

    def _show(self, answer: Answer) -> None:
        if not self._begun and len(self._answers) > 1:
            if self._current:
                echo()
            echo(styled(_shortened(answer.prompt), dim=True))
        self._begun = True
        if text := answer.news(self._tokenizer):
            echo_lines(text, nl=False)
            sys.stdout.flush()


def _shortened(prompt: Encoded) -> str:
    return prompt.text if len(prompt.text) <= 100 else f"{prompt.text[:99]}…"
