"""Texts that a trained model writes: on this machine, or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from raypp.control.clusters.find import Cluster
from raypp.errors import RunFailedError
from raypp.rank.data.tokenizer import PromptTokenizer
from raypp.tools.inference.client import use_on_cluster
from raypp.tools.inference.processes import Generators, NewToken
from raypp.tools.inference.prompts import Answer, end_ids
from raypp.tools.inference.source import Source


def complete(
    source: Source,
    pp: int,
    tokenizer: PromptTokenizer,
    answers: Sequence[Answer],
    rows: int,
    cluster: Cluster | None = None,
    on_token: Callable[[], None] = lambda: None,
    **choice: Any,
) -> None:
    """Generates the texts of all answers.

    Args:
        answers: One per prompt; they take the new tokens.
        rows: Prompts that are decoded together.
        cluster: Where the ranks run; None: on this machine.
        on_token: Called after each new token.
        choice: `temperature`, `top_p` and `seed`.

    Raises:
        RunFailedError: The generation ended before all texts were complete.
    """

    def take(new: NewToken) -> None:
        answers[new.prompt].add(new.token, new.finish)
        on_token()

    ends, prompts = end_ids(source, tokenizer), [answer.prompt for answer in answers]
    if cluster is None:
        with Generators(source, pp, ends, rows) as generators:
            for new in generators.generate(prompts, **choice):
                take(new)
        return
    asked = [[prompt.tokens, prompt.limit] for prompt in prompts]
    request = {"prompts": asked, "choice": choice, "ends": list(ends), "rows": rows}
    with closing(use_on_cluster(cluster, "generate", source, source.job(pp), request)) as reports:
        for report in reports:
            if "token" in report and report["token"][0] < len(answers):
                take(NewToken(*report["token"]))
    if any(answer.finish is None for answer in answers):
        raise RunFailedError("the generation on the cluster ended before all texts were complete")


def row(answer: Answer, tokenizer: PromptTokenizer) -> dict[str, Any]:
    """Returns an answer as `raypp generate --json` prints it."""
    text = answer.text(tokenizer)
    return {"prompt": answer.prompt.text, "text": text, "tokens": answer.tokens, "finish": answer.finish}
