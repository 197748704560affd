"""Samples during training are the same on every pipeline and do not affect training."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from harness import run_in_living, run_ranks
from small_models import small_options
from test_evaluation import VIRTUAL, aborted, lived
from training import document, thinned

from raypp.job.load import parse_job
from raypp.stages.pipeline.decode import Choice, PipelineDecoder, Prompt
from raypp.tools.inference.source import find_source

TEXT = str(Path(__file__).parents[2] / "jobs" / "data" / "kjv-new-testament.txt")
SAMPLE = {"prompts": ["In the beginning", "God"], "every_steps": 2, "max_new_tokens": 12}
MESHES: dict[str, dict[str, Any]] = {
    "one": {},
    "pp": {"pp": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved_1f1b", "pipeline": VIRTUAL},
    "V": {"pp": 2, "schedule": "zbv", "pipeline": VIRTUAL},
    "fsdp": {"fsdp": 2},
    "fsdp, weights stay": {"fsdp": 2, "reshard_after_forward": False},
    "recomputed": {"pp": 2, "train": {"activation_checkpointing": "full"}},
    "tp": {"tp": 2},
    "tp, repeated keys": {"tp": 4},
    "tp, pp": {"tp": 2, "pp": 2, "kind": "qwen3_next"},
    "tp, fsdp": {"tp": 2, "fsdp": 2, "kind": "gemma4"},
    "tp, ep": {"tp": 2, "fsdp": 2, "ep": 2, "kind": "gpt_oss"},
}


def source_of(name: str, samples: bool) -> dict[str, Any]:
    train = {**MESHES[name].get("train", {}), **({"sample": SAMPLE} if samples else {})}
    data, model = {"path": TEXT, "seq_len": 64}, {"vocab_size": 257}
    if kind := MESHES[name].get("kind"):
        model = small_options(kind, num_layers=4, **model).model_dump(mode="json", exclude_none=True)
    sections = {key: value for key, value in MESHES[name].items() if key != "kind"}
    return document(**{**sections, "train": train}, microbatches=4, model=model, data=data)


def live(rank: int, world: int, port: int, source: dict[str, Any]) -> dict[str, Any]:
    """Runs a complete training. Returns the reports and, on rank 0, the final weights, and how they
    continue the prompts."""
    found, whole = lived(rank, world, port, source)
    return found if whole is None else {**found, "again": continued(whole, parse_job(source))}


def continued(whole: torch.nn.Module, job: Any) -> list[list[int]]:
    tokenizer = find_source(f"{job.checkpoint.url}/{job.name}").open_tokenizer()
    prompts = [Prompt(tuple(tokenizer.encode(text).tolist()), SAMPLE["max_new_tokens"]) for text in SAMPLE["prompts"]]
    tokens: list[list[int]] = [[] for _ in prompts]
    decoder = PipelineDecoder({0: whole}, [0], 0, 32, torch.float32, torch.device("cpu"))
    decoder.run(prompts, Choice(), [256], lambda n, token, finish: tokens[n].append(token), rows=2)
    return tokens


@cache
def run_of(name: str, samples: bool = True) -> dict[str, Any]:
    source = source_of(name, samples)
    with TemporaryDirectory() as folder:
        source["checkpoint"] = {"url": folder, "every_steps": 0, "memory_tier": False}
        results = run_in_living(parse_job(source).mesh.world, ("sampled", str(source["mesh"])), live, source)
    assert not any(result["samples"] for result in results[1:])
    assert all(("sample" in result["phases"]) == samples for result in results)
    return results[0]


QUICK, GATE = ["one", "V", "tp, pp"], ["fsdp", "tp, ep"]


@pytest.mark.parametrize("name", thinned(MESHES, QUICK, GATE))
def test_a_run_with_samples_has_the_bits_of_one_without(name: str) -> None:
    with_them, without = run_of(name), run_of(name, False)
    assert [step for step, _ in with_them["samples"]] == [2, 3] and not without["samples"]
    assert with_them["numbers"] == without["numbers"]
    assert all(torch.equal(with_them["weights"][name], value) for name, value in without["weights"].items())


@pytest.mark.parametrize("name", thinned(MESHES, QUICK, GATE))
def test_samples_are_what_the_weights_of_their_step_continue(name: str) -> None:
    found = run_of(name)
    last = found["samples"][-1][1]
    assert [sample["prompt"] for sample in last] == SAMPLE["prompts"]
    assert [sample["tokens"] for sample in last] == found["again"]
    assert [sample["text"] for sample in last] == [bytes(t).decode(errors="replace") for t in found["again"]]


@pytest.mark.parametrize("name", thinned([name for name in MESHES if "fsdp" not in name and "tp" not in name], ["V"]))
def test_every_pipeline_takes_the_same_samples(name: str) -> None:
    assert run_of(name)["samples"] == run_of("one")["samples"]


def test_after_an_abort_no_sample_is_reported(tmp_path: Path) -> None:
    source = source_of("one", samples=True) | {"checkpoint": {"url": str(tmp_path)}}
    (kinds,) = run_ranks(1, aborted, source, "sample")
    assert "sampled" not in kinds
