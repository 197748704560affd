"""`python -m tests.family_errors`: prints docs/families.md's table of what each family's numbers
are off, as Markdown, and exits with 1 if any is more than it may be.

It takes a small random model of each family that transformers saved (the case `plain` of
`tests/unit/families/cases`). Names of families, such as `llama gemma4`, choose some. An error is
|ours - theirs| / |theirs| by 2-norms, the largest of all tensors that are compared.
"""

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TQDM_DISABLE="1")
sys.path.extend(
    f"{Path(__file__).parent}/{folder}" for folder in ("servers", "ranks", "unit/hf", "unit/inference", "unit/models")
)

import peft
import test_adapters as adapters
import test_decode_like_transformers as decoding
import test_families_against_transformers as alone
import torch
import training
from hf_models import tensors_of, written
from their_models import keys_of, loaded, options_in, rule_in_fp64, run, their_config

from benchmarks.surroundings import announce
from raypp.errors import JobError
from raypp.job.known_families import FAMILIES
from raypp.stages.models.documents import PackedDocuments
from raypp.state.checkpoint.commit import read_commit
from raypp.state.checkpoint.load_checkpoint import load_checkpoint
from raypp.state.hf.import_model import import_hf
from raypp.state.hf.model_files import HfFiles
from raypp.storage.directory import DirectoryStore
from raypp.tools.export.export_adapter import export_adapter
from raypp.tools.export.export_model import export_hf
from raypp.tools.parity import relative_error

MORE = {"gemma4": ("shared, per layer", "experts")}
"""Cases in rows of their own: layers that `plain` lacks."""
MOST = {
    "logits": 1e-5, "gradients": math.inf, "of fp64": 1e-5, "packed": 1e-5, "LoRA": 1e-5, "pp": 0.0, "ring": 1e-10,
    "Ulysses": 1e-10, "ep": 1e-10, "nf4, pp": 0.0, "nf4, ep": 1e-10, "export": 0.0, "tokens": 0.0,
}  # fmt: skip
"""The columns, and the largest error that each may have. Gradients are bounded by the next column:
those of transformers in fp32 are further from its own in fp64 than raypp's."""
WIDE = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16, "global_head_dim": 32,
    "shared_expert_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 16,
    "linear_value_head_dim": 16, "block_multiple_of": 64, "hidden_size_per_layer_input": 64,
}  # fmt: skip
"""Keys of config.json with which every matrix has rows that nf4 can store."""
DOCUMENTS = [11, 15, 7]
STEPS = 2


def worst(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(relative_error(ours[name], value) for name, value in theirs.items())


def of_mesh(mesh: dict[str, Any], folder: Path, dtype: torch.dtype, **more: Any) -> float:
    """Returns the error of all losses, gradients and final weights against one process."""
    model, results = options_in(folder).model_dump(mode="json", exclude_none=True) | more, []
    for axes in (mesh, {}):
        job = training.document(microbatches=4, **axes)
        results.append(training.trained({**job, "model": model}, STEPS, dtype=dtype, train=training.train_from_files))
    ours, theirs = results
    assert "lora" not in more or torch.uint8 in {weight.dtype for weight in theirs["weights"].values()}
    pairs = zip([*ours["gradients"], ours["weights"]], [*theirs["gradients"], theirs["weights"]], strict=True)
    losses = [{"loss": torch.tensor(found["loss"], dtype=torch.float64)} for found in results]
    return max(worst(*losses), *(worst(*pair) for pair in pairs))


def errors(kind: str, case: str, place: Path) -> Iterator[tuple[str, float]]:
    folder, tokens = place / "hf", alone.TOKENS
    model = written(kind, folder, case)
    options = options_in(folder)
    [ours] = loaded(folder)
    with torch.no_grad():
        yield "logits", relative_error(run([ours], tokens), model(tokens).logits)
        parts = torch.split(tokens, DOCUMENTS, 1)
        packed = PackedDocuments.of_rows([DOCUMENTS] * 2, sum(DOCUMENTS))
        positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand_as(tokens)
        yield "packed", relative_error(ours(tokens, positions, packed), torch.cat([model(p).logits for p in parts], 1))
    prompts = [torch.tensor([prompt]) for prompt in decoding.PROMPTS]
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    theirs = [model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)[0, ids.shape[1] :] for ids in prompts]
    found = decoding.decoded(loaded(folder), decoding.PROMPTS, rows=2, new=12)
    yield "tokens", float(found != [one.tolist() for one in theirs])
    gradients = alone.trained([ours])[1]
    yield "gradients", worst(gradients, their_gradients(model, place / "gradients"))
    exact = adapters.loaded(folder)
    rule_in_fp64(type(exact).__module__)
    yield "of fp64", worst(gradients, their_gradients(exact, place / "exact"))
    yield "export", export_error(folder, options, place)

    lora = adapters.options_of(folder)
    adapted = adapters.whole(lora)
    expected = adapters.our_logits(adapted)
    export_adapter(*adapters.saved(adapted, lora, place / "lora"), DirectoryStore(place / "adapter"))
    with_peft = peft.PeftModel.from_pretrained(adapters.loaded(folder), place / "adapter")
    yield "LoRA", relative_error(expected, adapters.their_logits(with_peft))

    has = their_config(kind, keys_of(kind, case)).to_dict() | keys_of(kind, case)
    if has.get("v_head_dim"):
        has.pop("head_dim", None)  # that of the rotated part
    written(kind, wide := place / "wide", case, **{key: size for key, size in WIDE.items() if has.get(key)})
    nf4 = {"rank": 4, "base": "nf4"}
    if not options.uncut():
        yield "pp", of_mesh({"pp": 2}, folder, torch.float32)
        yield "nf4, pp", of_mesh({"pp": 2}, wide, torch.float32, lora=nf4)
    yield "ring", of_mesh({"cp": 2}, folder, torch.float64)
    with suppress(JobError):
        yield "Ulysses", of_mesh({"cp": 2, "cp_style": "ulysses"}, folder, torch.float64)
    if getattr(options, "num_experts", None):
        yield "ep", of_mesh({"fsdp": 2, "ep": 2}, folder, torch.float64)
        yield "nf4, ep", of_mesh({"fsdp": 2, "ep": 2}, wide, torch.float64, lora=nf4)


def their_gradients(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Returns those of a mean loss by raypp's names: transformers saves them as it does weights."""
    logits = model(alone.TOKENS).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), alone.LABELS.flatten()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.float().save_pretrained(folder)
    return dict(loaded(folder)[0].named_parameters())


def export_error(folder: Path, options: Any, place: Path) -> float:
    """Returns 0 if an import, loaded, saved and exported, has the bytes of all tensors."""
    store, [stage] = DirectoryStore(place / "runs"), loaded(folder)
    import_hf(HfFiles(str(folder)), store, "run", options, {"model": options.model_dump(mode="json")})
    load_checkpoint(store, "run", 0, [stage.apply(alone.forget)], None)
    assert read_commit(store, "run", 0).step == 0
    export_hf(*adapters.saved(stage, options, place / "again"), DirectoryStore(place / "out"))
    before, after = tensors_of(folder), tensors_of(place / "out")
    return float(
        before.keys() != after.keys() or not all(alone.same_bytes(after[name], value) for name, value in before.items())
    )


def shown(column: str, error: float | None) -> str:
    if error is None:
        return "-"
    exact = {"pp": "bits", "nf4, pp": "bits", "export": "bytes", "tokens": "same"}
    text = exact[column] if column in exact and not error else f"{error:.0e}".replace("e-0", "e-")
    return text if error <= MOST[column] else f"**{text}**"


def main() -> int:
    announce(", ".join(f"{name} {version(name)}" for name in ("transformers", "peft")))
    print(f"|family|{'|'.join(MOST)}|\n|---|{'---|' * len(MOST)}", flush=True)
    failed = False
    for kind in sys.argv[1:] or FAMILIES:
        for case in ("plain", *MORE.get(kind, ())):
            with TemporaryDirectory() as place:
                found = dict(errors(kind, case, Path(place)))
            failed |= any(error > MOST[column] for column, error in found.items())
            name = f"`{kind}`" if case == "plain" else f"`{kind}`, {case}"
            print(f"|{name}|{'|'.join(shown(column, found.get(column)) for column in MOST)}|", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
