"""Greedy decoding gives the tokens of transformers' `generate`, for every case of every family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from their_models import FAMILY_CASES, family_cases, keys_of, loaded, options_in, their_config, their_instance

from raypp.stages.pipeline.decode import Choice, PipelineDecoder, Prompt, Repeats, length_that_changes_keys
from raypp.state.hf.original import repeat_settings, unused_settings

NEW = 6
PROMPTS = ((5, 17, 3, 80, 41, 9, 66, 12, 31, 58, 2, 90), (44, 7, 13))


def decoded(
    stages: list[torch.nn.Module], prompts: tuple[tuple[int, ...], ...], *, rows: int, new: int = NEW, **more: Any
) -> list[list[int]]:
    """Returns the new tokens of each prompt, from all stages in one process."""
    found: list[list[int]] = [[] for _ in prompts]
    held = dict(enumerate(stages))
    decoder = PipelineDecoder(
        held,
        [0] * len(held),
        0,
        32,
        torch.float32,
        torch.device("cpu"),
        border=length_that_changes_keys(stages[0].options),
        **more,
    )
    decoder.run(
        [Prompt(prompt, new) for prompt in prompts],
        Choice(),
        (),
        lambda number, token, finish: found[number].append(token),
        rows=rows,
    )
    return found


@family_cases(slow={case for _, case in FAMILY_CASES} - {"plain"})
def test_greedy_tokens_are_those_of_transformers(kind: str, case: str, tmp_path: Path) -> None:
    config = their_config(kind, keys_of(kind, case))
    model = their_instance(kind, config).eval()
    model.save_pretrained(tmp_path)
    # Where frequencies change with the length, only its Phi 3 computes the cached keys again.
    cached = kind == "phi3" or "longrope" not in case
    theirs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
            use_cache=cached, pad_token_id=0,
        )  # fmt: skip
        theirs.append(out[0, len(prompt) :].tolist())
    assert len({tuple(tokens) for tokens in theirs}) > 1, "prompts have different answers"
    # Layers that share K and V are on one stage.
    assert decoded(loaded(tmp_path, *(() if case == "shared, per layer" else (1,))), PROMPTS, rows=2) == theirs


@pytest.mark.parametrize(("penalty", "ngram"), [(1.8, 3), (0.6, 2), (1.0, 1), (1.3, 0)])
def test_repeats_are_avoided_as_a_generation_config_says(penalty: float, ngram: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = their_instance("llama", their_config("llama", keys_of("llama", "plain"))).eval()
    model.generation_config.update(repetition_penalty=penalty, no_repeat_ngram_size=ngram, eos_token_id=None)
    model.save_pretrained(tmp_path)
    theirs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, pad_token_id=0
        )
        theirs.append(out[0, len(prompt) :].tolist())
    options = options_in(tmp_path)
    assert repeat_settings(options) == (penalty, ngram) and not unused_settings(options)
    stages = loaded(tmp_path, 1)
    ours = decoded(stages, PROMPTS, rows=2, new=30, repeats=Repeats(*repeat_settings(options)))
    assert ours == theirs != decoded(stages, PROMPTS, rows=2, new=30)
