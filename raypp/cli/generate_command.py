"""`raypp generate`: text from a trained model, or a chat with it."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from raypp.api.inference import complete, reports_of, row, turn_of
from raypp.cli.options import chosen_cluster, cluster_options, mesh_option, note_paths, trust_option
from raypp.cli.output import echo, echo_json, echo_lines, styled
from raypp.errors import JobError, Problem
from raypp.rank.data.chat_files import end_of_turn
from raypp.rank.data.chat_template import ChatTemplate, TemplateFault
from raypp.rank.data.tokenizer import PromptTokenizer
from raypp.tools.inference.prompts import Answer, chat_end_ids, encode_conversation, encode_prompts, read_prompts
from raypp.tools.inference.source import Source, find_source

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
@click.option("--chat", is_flag=True, help="Answer each line that you type, with the model's chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message that the conversation begins with.")
@click.option("--step", type=click.IntRange(0), metavar="N", help="Step of the run's checkpoint.  [default: newest]")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Maximum number of new tokens per text.  [default: 128, or to the end of the context]",
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
    help="Sample only from the most likely tokens that together have this probability.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, _LARGEST_SEED),
    default=0,
    metavar="S",
    show_default=True,
    help="Seed for sampling.",
)
@mesh_option
@click.option(
    "--batch-size", type=click.IntRange(1), default=8, metavar="N", show_default=True, help="Prompts decoded together."
)
@click.option("--tokenizer", metavar="bytes|FILE", help="Tokenizer of a model that has none.  [default: the model's]")
@cluster_options
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt.")
def generate_command(
    run: str,
    given: tuple[str, ...],
    file: Path | None,
    chat: bool,
    system: str | None,
    step: int | None,
    max_new_tokens: int | None,
    temperature: float,
    top_p: float,
    seed: int,
    pp: int,
    batch_size: int,
    tokenizer: str | None,
    on_cluster: bool,
    address: str | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Continue prompts with a trained model, on this machine or on a cluster.

    The model is a run (its newest checkpoint, or URL/NAME/step-N), or the folder or store URL of
    a Hugging Face model. The tokens are the same for every --mesh.
    """
    if (count := bool(given) + (file is not None) + chat) != 1:
        fault = "none is given" if count == 0 else "only one of them can be given"
        fix = "give one or more --prompt TEXT, or --prompts FILE.jsonl, or --chat"
        raise JobError(Problem("--prompt, --prompts, --chat", fault, fix))
    if system is not None and not chat:
        raise JobError(Problem("--system", "a prompt is continued as it is", "add --chat, or put it into the prompt"))
    if chat and as_json:
        raise JobError(Problem("--json", "a conversation is not printed as JSON", "leave it out, or use --prompts"))
    if temperature == 0 and top_p < 1:
        raise JobError(Problem("--top-p", "temperature 0 always takes the most likely token", "add --temperature 1"))
    if chat and (on_cluster or address is not None):
        fault = "a conversation runs on this machine only"
        raise JobError(Problem("--chat", fault, "leave out --on-cluster and --address, or use --prompt"))
    cluster = chosen_cluster(on_cluster, address)
    texts = list(given) if file is None else read_prompts(file)
    source = find_source(run, step, trust=trust)
    if tokenizer is not None:
        source = replace(source, tokenizer=tokenizer)
    for remark in source.remarks:
        echo(f"note: {remark}", err=True)
    source.job(pp)  # checks the number of ranks
    codec = source.open_tokenizer()
    choice: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed}
    if chat:
        converse(source, pp, codec, source.open_template(), max_new_tokens, choice, system)
        return
    prompts = encode_prompts(source, codec, texts, max_new_tokens)
    answers = [Answer(prompt) for prompt in prompts]
    printer = _Printer(answers, codec, as_json)

    if cluster is not None:
        note_paths(cluster, source)
    complete(source, pp, codec, answers, batch_size, cluster, printer.update, **choice)


class _Printer:
    """Prints texts in the order of their prompts: token by token, or whole with `--json`."""

    def __init__(self, answers: list[Answer], tokenizer: PromptTokenizer, as_json: bool) -> None:
        self._answers, self._tokenizer, self._as_json = answers, tokenizer, as_json
        self._current = 0
        self._begun = False

    def update(self) -> None:
        while self._current < len(self._answers):
            answer = self._answers[self._current]
            if self._as_json:
                if answer.finish is None:
                    return
                echo_json(row(answer, self._tokenizer))
            else:
                self._show(answer)
                if answer.finish is None:
                    return
                echo_lines("")
                if answer.finish == "eos" and not answer.text(self._tokenizer).strip():
                    echo("note: the model ended its text at once", err=True)
            self._current, self._begun = self._current + 1, False
            sys.stdout.flush()

    def _show(self, answer: Answer) -> None:
        if not self._begun and len(self._answers) > 1:
            if self._current:
                echo()
            text = answer.prompt.text
            echo(styled(text if len(text) <= 100 else f"{text[:99]}…", dim=True))
        self._begun = True
        if text := answer.news(self._tokenizer):
            echo_lines(text, nl=False)
            sys.stdout.flush()


_MOST_CHARACTERS = 1 << 20


def converse(
    source: Source,
    pp: int,
    tokenizer: PromptTokenizer,
    template: ChatTemplate,
    max_new_tokens: int | None,
    choice: Mapping[str, Any],
    system: str | None = None,
) -> None:
    """Answers each line of standard input, until it ends. `max_new_tokens`: of an answer; None: as
    for prompts. `system`: the system message; None: the template's own, if it has one. Raises
    JobError: the conversation no longer fits into the context, or its template refuses it."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    answers: list[Answer] = []

    def turns() -> Iterator[dict[str, Any]]:
        while True:
            if sys.stdin.isatty():
                echo_lines(styled("> ", bold=True), nl=False)
            line = sys.stdin.readline(_MOST_CHARACTERS)
            if not line:
                return
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line.strip()})
            try:
                text = template.render(messages, add_generation_prompt=True).text
            except TemplateFault as fault:
                raise JobError(Problem("--chat", str(fault))) from fault
            answers.append(
                Answer(encode_conversation(source, tokenizer, text, max_new_tokens), stop=end_of_turn(template))
            )
            yield turn_of([answers[-1].prompt], choice)
            echo()
            messages.append({"role": "assistant", "content": answers[-1].text(tokenizer).strip()})

    request = turn_of([], choice) | {"ends": chat_end_ids(source, tokenizer, template), "rows": 1}
    with closing(reports_of(None, "generate", source, source.job(pp), request, turns())) as reports:
        for report in reports:
            if "token" in report:
                answers[-1].add(*report["token"][1:])
                if fresh := answers[-1].news(tokenizer):
                    echo_lines(fresh, nl=False)
                    sys.stdout.flush()
