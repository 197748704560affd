"""What this version of raypp can do, of what the job language can say.

To make something available, add its value to the line of its key; a key with nothing left to refuse loses its line.
"""

from __future__ import annotations

from typing import Any

from raypp.spec.families import MODELS

AVAILABLE: dict[str, tuple[Any, ...]] = {
    "data.kind": ("text", "jsonl", "tokens", "synthetic"),
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

OWN_KINDS = ("model.kind", "pipeline.schedule")
"""Keys whose word may also be the user's own: `module.path:object`."""

SUMMARIES: dict[tuple[str, str], str] = {
    **{("model.kind", kind.name): kind.summary for kind in MODELS},
    ("data.kind", "text"): "text files; a blank line ends a document",
    ("data.kind", "jsonl"): "a JSON object per line; data.text_key holds the text",
    ("data.kind", "tokens"): "token ids, already encoded",
    ("data.kind", "hf"): "a Hugging Face dataset",
    ("data.kind", "synthetic"): "random documents, to try a mesh without data",
    ("pipeline.schedule", "gpipe"): "all forwards, then all backwards",
    ("pipeline.schedule", "1f1b"): "one forward, one backward: fewest activations in flight",
    ("pipeline.schedule", "interleaved_1f1b"): "1f1b over several stages per rank: a smaller bubble, more on the links",
    ("pipeline.schedule", "looped_bfs"): "gpipe over several stages per rank, stage by stage",
    ("pipeline.schedule", "interleaved_zero_bubble"): "backward split in two: weight gradients fill the bubble",
    ("pipeline.schedule", "zbv"): "zero bubble, two stages per rank placed in a V",
    ("pipeline.schedule", "dualpipev"): "forward and backward overlapped, two stages per rank placed in a V",
    ("pipeline.schedule", "auto"): "the one that the plan predicts to be fastest",
    ("train.optimizer.kind", "adamw"): "Adam with decoupled weight decay",
    ("train.optimizer.kind", "sgd"): "gradient descent with momentum",
    ("train.optimizer.kind", "muon"): "orthogonalised momentum for matrices, AdamW for the rest",
}
"""One line of help for each of `KINDS`."""
