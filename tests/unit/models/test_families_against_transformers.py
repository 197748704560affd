"""The contract of every family with Hugging Face transformers, for random models that it saved.

Each family computes the same logits, gradients and optimizer step, in one stage or in two, and
gives back the files that it read.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collecting_reporter import CollectingReporter
from lazily import Lazily
from safetensors.torch import load_file
from their_models import FAMILY_CASES, family_cases, keys_of, loaded, options_in, run, their_config, their_instance
from torch import nn
from torch.distributed import TCPStore

from raypp.job.job import OptimizerOptions
from raypp.rank.optimizers.optimizer import build_optimizer
from raypp.records import Coordinates, Seat
from raypp.stages.models.loss import Targets
from raypp.state.checkpoint.announce import Announcements
from raypp.state.checkpoint.commit import read_commit
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.checkpoint.ranged_reads import verify_checkpoint
from raypp.state.checkpoint.save import CheckpointSaver
from raypp.state.hf.import_model import import_hf
from raypp.state.hf.model_files import HfFiles
from raypp.storage.directory import DirectoryStore
from raypp.tools.export.export_model import export_hf

transformers: Any = Lazily("transformers")
every_case = family_cases(slow={case for _, case in FAMILY_CASES} - {"plain"})
once_each = pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param(kind, case, marks=() if case == "plain" else pytest.mark.slow) for kind, case in FAMILY_CASES],
    scope="module",
)
"""A family's other cases differ in sizes, biases, ties and keys: slow tests go through their files.
"""
# A large eps: where a gradient is nearly 0, a step of Adam would depend on its rounding errors.
ADAMW = OptimizerOptions(lr=1e-2, eps=1e-3, weight_decay=0.1)
TOKENS = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.roll(-1, 1)


@dataclass
class Theirs:
    """A random model of transformers, and what it computes.

    Attributes:
        folder: Where transformers saved it, in several files.
        gradients, stepped: Where it saved the gradients, and the weights after one step of AdamW.
        logits: `[B, T, V]`.
        loss: The mean over tokens.
    """

    folder: Path
    gradients: Path
    stepped: Path
    logits: torch.Tensor
    loss: float


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that makes a case's model once."""

    @cache
    def made(kind: str, case: str) -> Theirs:
        model = their_instance(kind, their_config(kind, keys_of(kind, case)))
        root = tmp_path_factory.mktemp("theirs")
        found = Theirs(root / "model", root / "gradients", root / "stepped", model(TOKENS).logits, 0.0)
        model.save_pretrained(found.folder, max_shard_size="20KB")
        loss = F.cross_entropy(found.logits.flatten(0, 1), LABELS.flatten())
        loss.backward()
        found.logits, found.loss = found.logits.detach(), loss.item()
        # transformers itself says which gradient belongs to which tensor of its files. It does not
        # run an expert that no token selected.
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            model.save_pretrained(found.gradients)
            for parameter, value in zip(model.parameters(), weights, strict=True):
                parameter.copy_(value)
        adamw_on(model).step()
        model.save_pretrained(found.stepped)
        return found

    return made


def adamw_on(model: nn.Module) -> torch.optim.AdamW:
    named = list(model.named_parameters())
    still = ("bias", "conv1d.weight", "conv.weight")
    matrices = [parameter for name, parameter in named if parameter.ndim > 1 and not name.endswith(still)]
    others = [parameter for name, parameter in named if parameter.ndim <= 1 or name.endswith(still)]
    groups = [{"params": matrices, "weight_decay": ADAMW.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps)


def trained(stages: list[nn.Module]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Computes the gradients of the mean loss. Returns the loss and the gradients by name."""
    whole: Any = stages[0] if len(stages) == 1 else None
    if whole is not None and whole.options.tie_embeddings:
        whole.separate_projection()
    loss = run(stages, TOKENS, targets=Targets(LABELS)) / LABELS.numel()
    loss.backward()
    if whole is not None:
        whole.join_projection()
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, name
            found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return loss.detach(), found


def assert_close(found: dict[str, torch.Tensor], expected: nn.Module) -> None:
    wanted = dict(expected.named_parameters())
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, wanted[name].detach(), rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@every_case
def test_logits_gradients_and_an_optimizer_step_are_those_of_transformers(kind: str, case: str, theirs: Any) -> None:
    made = theirs(kind, case)
    [ours] = loaded(made.folder)
    with torch.no_grad():
        torch.testing.assert_close(run([ours], TOKENS), made.logits, rtol=1e-5, atol=1e-5)
    loss, gradients = trained([ours])
    assert loss.item() == pytest.approx(made.loss, abs=1e-5)
    assert_close(gradients, loaded(made.gradients)[0])
    before = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    build_optimizer([ours], ADAMW).step()
    after = dict(ours.named_parameters())
    assert_close(after, loaded(made.stepped)[0])
    still = [name for name, value in before.items() if (after[name] - value).abs().max() < 1e-4]
    assert not still, "every parameter affects the loss, so the comparison covers it"


@every_case
def test_two_stages_compute_the_bits_of_one(kind: str, case: str, theirs: Any) -> None:
    folder = theirs(kind, case).folder
    if options_in(folder).uncut():
        pytest.skip("the planner refuses this cut")
    loss, gradients = trained(loaded(folder))
    of_two, found = trained(loaded(folder, 1))
    assert torch.equal(loss, of_two) and gradients.keys() == found.keys()
    assert [name for name in gradients if not torch.equal(gradients[name], found[name])] == []


@once_each
def test_import_then_no_step_then_export_gives_the_same_bytes(
    kind: str, case: str, theirs: Any, tmp_path: Path
) -> None:
    folder = theirs(kind, case).folder
    assert len(list(folder.glob("*.safetensors"))) > 2
    options = options_in(folder)
    store, job = DirectoryStore(tmp_path / "store"), {"model": options.model_dump(mode="json")}
    # Objects so small that tensors and stacks of experts are split over several of them.
    import_hf(HfFiles(str(folder)), store, "run", options, job, object_bytes=7000)
    assert len(read_commit(store, "run", 0).objects) > 3 and verify_checkpoint(store, "run", 0) == []
    stages = [stage.apply(forget) for stage in loaded(folder, 1)]
    optimizer = build_optimizer(stages, ADAMW)
    assert load_checkpoint(store, "run", 0, stages, optimizer) is not None
    seat = Seat("again", 1, 0, 1, Coordinates(), Coordinates(1, 1, 1, 1, 1))
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    saver = CheckpointSaver(
        store, "again", job, seat, Announcements(server, 1), CollectingReporter(), 3, commit_timeout_s=5
    )
    saver.save(1, stages, optimizer, {})
    assert saver.wait() == 1
    saver.close()
    export_hf(store, read_commit(store, "again", 1), DirectoryStore(tmp_path / "out"), shard_bytes=30_000)
    before, after = (tensors_of(place) for place in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert [name for name in before if not same_bytes(before[name], after[name])] == []
    model, notes = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    # Weights as they lie in a file are not aligned, and some CPUs' kernels then round differently.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(model(TOKENS).logits, theirs(kind, case).logits)
    ignored = {"from_hf", "aux_loss_weight", "init_std"}
    assert options_in(tmp_path / "out").model_dump(exclude=ignored) == options.model_dump(exclude=ignored)


@torch.no_grad()
def forget(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.fill_(float("nan"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
