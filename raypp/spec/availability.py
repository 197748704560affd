"""What this version of raypp can do, of what the job language can say.

To make something available, add its value to the line of its key; a key with nothing left to refuse loses its line.
"""

from __future__ import annotations

from typing import Any

from raypp.spec.models import MODELS

AVAILABLE: dict[str, tuple[Any, ...]] = {
    "model.kind": ("llama",),
    "model.from_hf": (None,),
    "model.tie_embeddings": (False,),
    "data.kind": ("text", "jsonl", "tokens", "synthetic"),
    "data.eval": (None,),
    "mesh.cp": (1,),
    "mesh.ep": (1,),
    "pipeline.schedule": ("gpipe", "1f1b"),
    "pipeline.stages_per_rank": (1,),
    "pipeline.lookahead": ("auto", 0),
    "pipeline.wire.dtype": ("auto",),
    "pipeline.wire.compression": ("none",),
    "train.optimizer.kind": ("adamw",),
    "train.activation_checkpointing": ("none", "full"),
    "train.compile": (False,),
    "train.eval_every_steps": (0,),
    "recovery.elastic": (False,),
    "resources.spares": (0,),
}
"""Values that work, of the keys that have values which do not work yet; every other key works whole."""

KINDS: dict[str, tuple[str, ...]] = {
    "model.kind": tuple(MODELS.names()),
    "data.kind": ("text", "jsonl", "tokens", "hf", "synthetic"),
    "pipeline.schedule": (
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv",
        "dualpipev",
        "auto",
    ),
    "train.optimizer.kind": ("adamw", "sgd", "muon"),
}
"""Every word the language has for the keys whose type is plain text."""

OWN_KINDS = ("model.kind",)
"""Keys whose word may also be the user's own `module.path:factory`."""
