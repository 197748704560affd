"""The conversation of `raypp generate --chat`: lines of the user, answers of the model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from raypp.cli.output import echo, echo_lines, styled
from raypp.data.chat_template import ChatTemplate, TemplateFault
from raypp.data.tokenizer import PromptTokenizer
from raypp.errors import JobError, Problem
from raypp.inference.processes import Generators
from raypp.inference.prompts import Answer, encode_conversation, end_of_turn
from raypp.inference.source import Source

_MOST_CHARACTERS = 1 << 20


def converse(
    source: Source,
    tokenizer: PromptTokenizer,
    template: ChatTemplate,
    generators: Generators,
    max_new_tokens: int | None,
    choice: Mapping[str, Any],
) -> None:
    """Answers each line of standard input, until it ends.

    Args:
        source: The model.
        tokenizer: Its tokenizer.
        template: Its chat template.
        generators: Its processes.
        max_new_tokens: The most tokens of an answer; None: as for prompts.
        choice: How tokens are chosen: `temperature`, `top_p`, `seed`.

    Raises:
        JobError: The conversation no longer fits into the context, or its template refuses it.
    """
    stop = end_of_turn(template)
    messages: list[dict[str, Any]] = []
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
        answer = Answer(encode_conversation(source, tokenizer, text, max_new_tokens), stop=stop)
        for new in generators.generate([answer.prompt], **choice):
            answer.add(new.token, new.finish)
            if fresh := answer.news(tokenizer):
                echo_lines(fresh, nl=False)
                sys.stdout.flush()
        echo()
        messages.append({"role": "assistant", "content": answer.text(tokenizer).strip()})
