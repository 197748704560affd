"""Dropout of adapters: no mesh, schedule or recomputation changes what is dropped."""

import logging
from typing import Any

import pytest
from comparison import assert_close, assert_identical, assert_same_sums
from test_lora import document as adapters
from test_recompute_and_compile import COMPILED, needs_compiler
from training import numbers, thinned, train_steps, trained

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj"]
"""Targets that are no matrices of experts."""


def document(dropout: float = 0.25, kind: str = "llama", **sections: Any) -> dict[str, Any]:
    targets = DENSE if kind == "qwen3_moe" else ["all-linear"]
    found = adapters(targets, kind=kind, **sections)
    found["model"]["lora"]["dropout"] = dropout
    return found


def with_recomputation(extent: str, compiled: bool = False, **sections: Any) -> dict[str, Any]:
    return document(train={"activation_checkpointing": extent, "compile": compiled}, **sections)


PIPELINES = {
    "llama": document(mesh={"pp": 2}, train={"activation_checkpointing": "full"}),
    "llama, split": document(mesh={"pp": 2}, schedule="zbv", pipeline={"stages_per_rank": 2}),
    "qwen3_moe": document(mesh={"pp": 2}, kind="qwen3_moe"),
}
MESHES = {
    ("llama", "fsdp"): document(mesh={"fsdp": 2}),
    ("llama", "dp_replicate"): document(mesh={"dp_replicate": 2}),
    ("llama", "ring"): document(mesh={"cp": 2, "cp_style": "ring"}),
    ("llama", "ulysses"): document(mesh={"cp": 2, "cp_style": "ulysses"}),
    ("qwen3_moe", "ep, selective"): with_recomputation("selective", kind="qwen3_moe", mesh={"fsdp": 2, "ep": 2}),
}


@pytest.mark.parametrize("extent", thinned(["full", "selective", "offload"], ["selective"]))
def test_a_recomputed_forward_drops_the_same(extent: str) -> None:
    assert_identical(trained(with_recomputation(extent)), trained(document()))


def test_dropout_changes_the_numbers_as_soon_as_adapters_do_something() -> None:
    ours, theirs = trained(document())["loss"], trained(document(0.0))["loss"]
    assert ours[0] == theirs[0] and ours[1:] != theirs[1:]


def test_a_dropout_of_zero_gives_the_bits_of_a_job_without_the_key() -> None:
    without_the_key = document()
    del without_the_key["model"]["lora"]["dropout"]
    assert_identical(trained(document(0.0)), trained(without_the_key))


def test_a_probability_that_drops_nothing_gives_the_bits_of_none() -> None:
    assert_identical(trained(document(1e-6)), trained(document(0.0)))


@pytest.mark.parametrize("case", thinned(PIPELINES, ["llama, split"]))
def test_a_pipeline_gives_the_bits_of_one_process(case: str) -> None:
    assert_identical(trained(PIPELINES[case]), trained(document(kind=case.partition(",")[0])))


@pytest.mark.parametrize(("model", "way"), thinned(MESHES, [], [("qwen3_moe", "ep, selective")]))
def test_ranks_that_share_a_step_add_the_same_gradients(model: str, way: str) -> None:
    assert_same_sums(numbers(MESHES[model, way]), numbers(document(kind=model)))


def warned(rank: int, world: int, port: int, *arguments: Any) -> dict[str, Any]:
    """Trains as `train_steps` does and returns the compiler's warnings, too."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    for name in ("torch", *logging.root.manager.loggerDict):  # not all of torch's pass records on
        if name.startswith("torch"):
            logging.getLogger(name).addHandler(Keep(logging.WARNING))
    found = train_steps(rank, world, port, *arguments)
    return {**found, "warnings": lines}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("extent", ["none", "full", "selective"])
def test_compiled_layers_drop_the_same_and_all_are_compiled(extent: str) -> None:
    """torch gives up with a warning when layer after layer needs code of its own."""
    found, plain, eager = (
        trained(with_recomputation(of, compiled, model={"num_layers": 10}), 2, train=warned)
        for of, compiled in ((extent, True), ("none", True), ("none", False))
    )
    assert_close(found, eager, COMPILED)
    assert_identical(found, plain)
    assert not [line for line in found["warnings"] if "recompile_limit" in line]
