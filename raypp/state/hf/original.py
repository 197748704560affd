"""What a run keeps of the model that it began with, and what its export takes from that.

config.json and generation_config.json are kept as texts in the `model:` section (`model.original`),
so they are in the run's job and in every COMMIT.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from raypp.errors import CheckpointError, JobError, Problem
from raypp.job.known_families import family_of
from raypp.job.limits import TEXT
from raypp.job.load import parse_job
from raypp.job.models import DecoderOptions, OriginalFiles
from raypp.job.rope import CONTEXT_FIXING
from raypp.state.checkpoint.commit import Commit
from raypp.state.checkpoint.run_spec import read_spec
from raypp.state.hf.model_files import EMBEDDING, KEY, HfFiles, base_identity
from raypp.state.hf.text_config import multimodal, text_config, with_text_changes
from raypp.storage import ObjectStore, StoreError
from raypp.untrusted.documents import Bounds, parse_object

_BOUNDS = Bounds(size=4 << 20)
_CONTEXT = 2048
"""The context of a model that names none."""
_CONTEXT_KEY = "max_position_embeddings"
_MOST_IDS = 1000
_UNUSED = (
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "sequence_bias", "min_length", "min_new_tokens", "num_beams", "exponential_decay_length_penalty", "guidance_scale",
    "stop_strings", "encoder_repetition_penalty", "penalty_alpha", "top_k", "min_p", "typical_p",
)  # fmt: skip
"""Settings of generation that change a text."""


def with_original(options: DecoderOptions, files: HfFiles, config: Mapping[str, Any]) -> DecoderOptions:
    """Returns the `model:` section with the files that an export keeps. Files that are too long for
    a job are not kept, except for the context. Raises JobError: generation_config.json is not JSON,
    or is too large; or a multimodal model's config.json is too long to be kept."""
    generation, rest = files.generation_config(), multimodal(config)
    kept = OriginalFiles(
        config=_text(config),
        generation_config=None if generation is None else _text(generation),
        rest=files.store.url if rest else None,
        rest_id=base_identity(files) if rest else None,
        fp32=_in_fp32(options, files),
    )
    if rest and len(kept.config) > TEXT:
        fault = f"{files.place('config.json')} has {len(kept.config):,} characters, of which a run keeps {TEXT:,}"
        raise JobError(Problem(KEY, fault, "remove keys that have their defaults, such as id2label"))
    if max(len(kept.config), len(kept.generation_config or "")) > TEXT:
        fixed = options.rope is not None and options.rope.kind in CONTEXT_FIXING
        context = options.max_context if fixed else options.max_context or _length(text_config(config))
        return options.model_copy(update={"original": None, "max_context": context})
    return options.model_copy(update={"original": kept})


def _in_fp32(options: DecoderOptions, files: HfFiles) -> tuple[str, ...]:
    """Returns `OriginalFiles.fp32`; empty if headers cannot be read, which readers report."""
    family = family_of(options)
    names = frozenset() if family is None else family.fp32_names(options)
    if not names:
        return ()
    with suppress(CheckpointError, StoreError):
        there = files.tensors([*names, EMBEDDING])
        if EMBEDDING in there and there[EMBEDDING].dtype != "F32":
            return tuple(sorted({in_layer(name) for name in names & there.keys() if there[name].dtype == "F32"}))
    return ()


def in_layer(name: str) -> str:
    """Returns the name of a parameter within its layer."""
    return name.removeprefix("model.layers.").partition(".")[2]


def saved_options(store: ObjectStore, commit: Commit) -> DecoderOptions:
    """Returns the `model:` section of the job that wrote a checkpoint. The files of its original
    are in the first job of a run that was imported, and resumed with a job that names no model; and
    still beside the frozen weights of adapters. Raises JobError: COMMIT has no such section."""
    model = commit.job.get("model")
    if not isinstance(model, dict):
        raise JobError(Problem(f"step {commit.step} of {commit.run}", "its COMMIT does not name the model"))
    if model.get("original") is None:
        try:
            first = read_spec(store, commit.run, 1).get("model") or {}
        except CheckpointError:
            first = {}
        model = {**model, "original": first.get("original")}
    options = parse_job({"name": commit.run, "model": model}).model
    if options.original is None and options.lora is not None and options.from_hf is not None:
        with suppress(JobError, StoreError):  # whoever needs the frozen weights reports that
            files = HfFiles(options.from_hf)
            options = with_original(options, files, files.config())
    return options


def section_of(document: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """Returns a section of a stored job; empty if it has none."""
    section = (document or {}).get(name)
    return section if isinstance(section, Mapping) else {}


def trained_length(job: Mapping[str, Any]) -> int:
    """Returns the length of the rows that a run trained on; 0 if its job does not say."""
    length = section_of(job, "data").get("seq_len")
    return length if isinstance(length, int) and length > 0 else 0


def model_context(options: DecoderOptions, trained: int = 0) -> int:
    """Returns the tokens that a model takes: what its export declares, and generation allows.
    `trained`: length of the rows that it was trained on since; 0: none."""
    kept = None if options.original is None else _length(_text_config(options))
    rope = options.rope
    if rope is not None and rope.kind in CONTEXT_FIXING and rope.original_context:
        extended = round(rope.original_context * (rope.factor or 1.0))
        return max(extended, kept or 0)
    context = max(options.max_context or kept or 0, trained) or _CONTEXT
    if rope is not None and rope.kind == "llama3" and kept is None and rope.original_context:
        context = max(context, round(rope.original_context * (rope.factor or 1.0)))
    return context


def exported_config(options: DecoderOptions, ours: dict[str, Any], context: int) -> dict[str, Any]:
    """Returns the config.json of an export: the original's, with what training changed. `ours`:
    what a model without an original gets. `context`: tokens that the model takes."""
    original, text = _config(options), _text_config(options)
    family = family_of(options)
    if original is None or family is None:
        return ours
    parts = [original, *(part for part in original.values() if isinstance(part, dict))]
    for part in parts:
        part.pop("quantization_config", None)
    changes = {key: ours["torch_dtype"] for key in ("dtype", "torch_dtype") if any(key in part for part in parts)}
    changes = changes or {"torch_dtype": ours["torch_dtype"]}
    if not multimodal(original):
        changes["architectures"] = ours["architectures"]
    changes[family.hf.sizes["vocab_size"]] = options.vocab_size
    tied = family.hf.settings["tie_embeddings"]
    tied = newer if (newer := family.hf.newer.get(tied)) in text else tied
    if text.get(tied, family.hf.defaults.get("tie_embeddings")) != options.tie_embeddings:
        changes[tied] = options.tie_embeddings
    fixed = options.rope is not None and options.rope.kind in CONTEXT_FIXING
    if not fixed and context != _length(text):
        changes[_CONTEXT_KEY] = context
    return with_text_changes(original, changes)


def added_rows(options: DecoderOptions) -> int:
    """Returns how many ids the model has more than the original."""
    rows = _text_config(options).get("vocab_size")
    return options.vocab_size - rows if isinstance(rows, int) else 0


def original_generation(options: DecoderOptions) -> dict[str, Any] | None:
    """Returns the original's generation_config.json; None if there is none."""
    text = None if options.original is None else options.original.generation_config
    return None if text is None else parse_object(text.encode(), "model.original.generation_config", _BOUNDS, JobError)


def repeat_settings(options: DecoderOptions) -> tuple[float, int]:
    """Returns `repetition_penalty` and `no_repeat_ngram_size` of generation_config.json."""
    given = original_generation(options) or {}
    penalty, ngram = given.get("repetition_penalty"), given.get("no_repeat_ngram_size")
    penalty = float(penalty) if isinstance(penalty, int | float) and 0 < penalty < math.inf else 1.0
    return penalty, ngram if isinstance(ngram, int) and ngram > 0 else 0


def unused_settings(options: DecoderOptions) -> list[str]:
    """Returns a remark on what else generation_config.json changes of texts, if it does."""
    given = original_generation(options) or {}
    named = [key for key in _UNUSED if given.get(key) not in (None, False, 0, 1, [])]
    return [f"{', '.join(named)} of generation_config.json: not used, raypp has no such settings"] if named else []


def default_generation(options: DecoderOptions) -> dict[str, Any]:
    """Returns the ids that transformers takes from the original's config.json for generation."""
    config = _text_config(options)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config.get(key) is not None}


def end_ids(generation: Mapping[str, Any] | None, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the ids that end a text, as transformers' `generate` takes them. `generation`: of
    generation_config.json; None if there is none. `config`: of config.json."""
    given = (generation or {}).get("eos_token_id")
    given = config.get("eos_token_id") if given is None else given
    ids: Sequence[Any] = given if isinstance(given, list) else [given]
    return tuple(one for one in ids[:_MOST_IDS] if isinstance(one, int) and not isinstance(one, bool))


def original_ends(options: DecoderOptions) -> tuple[int, ...]:
    """Returns the ids that end a text of the original; empty if there is none."""
    return end_ids(original_generation(options), _text_config(options))


def _config(options: DecoderOptions) -> dict[str, Any] | None:
    if options.original is None:
        return None
    return parse_object(options.original.config.encode(), "model.original.config", _BOUNDS, JobError)


def _text_config(options: DecoderOptions) -> dict[str, Any]:
    """Returns the config of the original's text; empty if there is none."""
    return text_config(_config(options) or {})


def _length(config: Mapping[str, Any]) -> int:
    length = config.get(_CONTEXT_KEY)
    return int(length) if isinstance(length, int | float) and length > 0 else _CONTEXT


def _text(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, indent=2)
    return text if len(text) <= TEXT else json.dumps(document, separators=(",", ":"))
