"""The documents of a folder of token shards, as `raypp data tokenize` writes them.

`PLAN` says what the folder will hold and is written first; `MANIFEST` is written last, so a folder
without it is unfinished. Shard N is three objects: `.ids`, the ids of whole documents one after
another; `.index`, where each document ends (int64 `[documents]`) followed by the CRC-32 of each
block of the ids (uint32); and `.json`, its record, written after the others. All little-endian.

Format 2 is for documents of which only some tokens carry loss. A shard then has a fourth object,
`.loss`: a bit per id, the first in the lowest bit; its blocks' CRC-32 follow in the index.
Documents whose tokens all carry loss are written in format 1.
"""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le, MaxLen

from raypp.rank.data.tokenizer import Tokenizer
from raypp.untrusted.documents import Bounds, Count

PLAN, MANIFEST = "tokens-plan.json", "tokens.json"
BLOCK = 64 << 10
"""Bytes of ids, or of bits of loss, that have one checksum and are read at once."""
RECORD_BOUNDS = Bounds(16 << 10, 100)
MANIFEST_BOUNDS = Bounds(64 << 20, 600_000)

_Digest = Annotated[str, MaxLen(64)]
_Text = Annotated[str, MaxLen(4096)]
_Around = Annotated[list[Count], MaxLen(64)]


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard. `tokens` and `documents`: how many it holds. `ids_sha256`, `index_sha256`
    and `loss_sha256`: of its objects; the last is empty in format 1."""

    tokens: Annotated[int, Ge(1), Le(2**40)]
    documents: Annotated[int, Ge(1), Le(2**40)]
    ids_sha256: _Digest
    index_sha256: _Digest
    loss_sha256: _Digest = ""


@dataclass(frozen=True)
class ShardPlan:
    """What a folder of shards is made from.

    Attributes:
        format: Version of the format; 2 has loss masks.
        source: Changes if a file of the source, or how it is read, does.
        path: The `data.path` of the source, for people.
        tokenizer, vocab_size, end_id: The tokenizer's identity, number of ids and end id.
        dtype: Of the ids.
        block: Bytes of ids per checksum.
        shard_bytes: A shard ends with the document that reaches this size.
        template: Identity of the chat template; empty if there is none.
        around: The ids before and after each text; empty if there are none.
    """

    format: Literal[1, 2]
    source: _Digest
    path: _Text
    tokenizer: _Text
    vocab_size: Annotated[int, Ge(1), Le(2**40)]
    end_id: Count
    dtype: Literal["uint8", "uint16", "uint32", "uint64"]
    block: Literal[65536]
    shard_bytes: Annotated[int, Ge(1), Le(2**40)]
    template: _Text = ""
    around: tuple[_Around, ...] = ()

    @property
    def masks(self) -> bool:
        """Whether the shards say which ids carry loss."""
        return self.format == 2


@dataclass(frozen=True)
class Manifest:
    """A finished folder of shards. `digest`: of all documents, that of the source's own corpus."""

    plan: ShardPlan
    digest: _Digest
    tokens: Count
    documents: Count
    shards: list[ShardRecord]

    @property
    def size(self) -> int:
        """Bytes of all ids and loss masks."""
        masks = sum(mask_bytes(one.tokens) for one in self.shards) if self.plan.masks else 0
        return self.tokens * np.dtype(self.plan.dtype).itemsize + masks


def around_of(tokenizer: Tokenizer) -> tuple[list[int], ...]:
    """Returns `ShardPlan.around` for a tokenizer."""
    return (list(tokenizer.before), list(tokenizer.after)) if tokenizer.before or tokenizer.after else ()


def shard_name(number: int) -> str:
    """Returns the name of a shard's objects, without their endings."""
    return f"shard-{number:06d}"


def mask_bytes(tokens: int) -> int:
    """Returns the bytes of the loss mask of `tokens` ids."""
    return -(-tokens // 8)


def blocks_of(size: int) -> int:
    """Returns the number of blocks of `size` bytes."""
    return -(-size // BLOCK)


def as_json(document: ShardRecord | ShardPlan | Manifest) -> bytes:
    return json.dumps(asdict(document)).encode()
