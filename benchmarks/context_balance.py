"""How evenly context-parallel ranks share the work of attention, on real packed text.

Counts pairs of a query and a key that it sees. Nothing is timed, so the figures are the same on
every machine with the same text. Uses two texts: the repository's New Testament, where every verse
is a document, and Python's standard library, where every file is a document
(`sysconfig.get_path("stdlib")`).

    python -m benchmarks.context_balance
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.surroundings import announce
from raypp.data.loader import open_loader
from raypp.data.packing import Row
from raypp.models.documents import PackedDocuments
from raypp.parallel import zigzag
from raypp.pipeline.agreement import padded_length
from raypp.pipeline.collate import longest_row
from raypp.spec.load import parse_job

MICROBATCHES = 48
ZIGZAG = zigzag.zigzag
VERSES = Path(__file__).parents[1] / "jobs" / "data" / "kjv-new-testament.txt"


@dataclass(frozen=True)
class Balance:
    """The work of the slowest rank, as a multiple of an even share: 1 is perfect.

    Attributes:
        microbatch: Over all pairs of a microbatch. This counts for Ulysses, and for a ring that
            never waits.
        hop: Hop by hop. This counts if every hop waits for the slowest rank.
    """

    microbatch: float
    hop: float


def packed_rows(data: dict[str, Any]) -> list[tuple[Row, ...]]:
    """Loads microbatches of one row each."""
    job = parse_job(
        {
            "name": "balance",
            "model": {"vocab_size": 320},
            "data": {"tokenizer": "bytes", **data},
            "pipeline": {"microbatches": MICROBATCHES},
            "train": {"micro_batch_size": 1},
        }
    )
    loader = open_loader(job, 0, 1)
    rows = [tuple(microbatch.rows) for microbatch in loader.next_step()]
    loader.close()
    return rows


Layout = Callable[[int, int], tuple[int, int]]
"""(rank, size) -> the two chunks of a row that the rank holds, ascending."""


def contiguous(rank: int, size: int) -> tuple[int, int]:
    """Returns two neighbouring chunks, as a plain cut gives."""
    return 2 * rank, 2 * rank + 1


def pairs_of(block: zigzag.Block) -> int:
    """Returns the number of pairs of a query and a key that it sees."""
    queries, keys = (int(span.stop - span.start) for span in (block.queries, block.keys))
    return queries * (queries + 1) // 2 if block.causal else queries * keys


def balance(microbatches: Sequence[tuple[Row, ...]], size: int, layout: Layout) -> Balance:
    """Computes the balance over all microbatches."""
    zigzag.zigzag = layout  # type: ignore[assignment]
    even = slowest = by_hop = 0.0
    for rows in microbatches:
        length = padded_length(longest_row(rows), cp=size, multiple=8)
        documents = PackedDocuments.of_rows([row.documents for row in rows], length)
        plans = [zigzag.plan_ring(documents.lengths, length, rank, size) for rank in range(size)]
        pairs = [[sum(map(pairs_of, hop)) for hop in plan.blocks] for plan in plans]
        even += sum(map(sum, pairs)) / size
        slowest += max(map(sum, pairs))
        by_hop += sum(map(max, zip(*pairs, strict=True)))
    return Balance(slowest / even, by_hop / even)


def report(name: str, data: dict[str, Any], sizes: Sequence[int]) -> None:
    microbatches = packed_rows(data)
    documents = [length for rows in microbatches for row in rows for length in row.documents]
    mean = sum(documents) / len(documents)
    print(f"\n{name}, rows of {data['seq_len']}: {len(documents)} documents, {mean:.0f} tokens in the mean")
    print("| cp | zig-zag, microbatch | contiguous, microbatch | zig-zag, hop by hop | contiguous, hop by hop |")
    print("|---|---|---|---|---|")
    for size in sizes:
        ours, plain = (balance(microbatches, size, layout) for layout in (ZIGZAG, contiguous))
        print(f"| {size} | {ours.microbatch:.3f} | {plain.microbatch:.3f} | {ours.hop:.3f} | {plain.hop:.3f} |")


def standard_library(folder: Path) -> str:
    """Writes the standard library's files as JSON lines, in order of name; returns the path."""
    path = folder / "stdlib.jsonl"
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(file.parts))
    with path.open("w") as lines:
        for file in files:
            if text := file.read_text(encoding="utf-8", errors="replace"):
                lines.write(json.dumps({"text": text}) + "\n")
    return str(path)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    announce()
    for seq_len in (256, 8192):
        report("verses", {"kind": "text", "path": str(VERSES), "seq_len": seq_len}, (2, 4))
    with tempfile.TemporaryDirectory() as folder:
        path = standard_library(Path(folder))
        for seq_len in (8192, 32768):
            report("Python files", {"kind": "jsonl", "path": path, "seq_len": seq_len}, (2, 4, 8))


if __name__ == "__main__":
    main()
