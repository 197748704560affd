"""Prompts and model folders of others: refused in words, within bounds, and shown harmlessly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hf_folder import write_hf_folder

from raypp.errors import RayppError
from raypp.inference.prompts import read_prompts
from raypp.inference.source import find_source

SIZES = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "ffn_size": 8, "vocab_size": 11}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[" * 100_000, "p.jsonl:1"),
        (b'{"prompt": "a"' + b',"x":1' * 400_000 + b"}", "at most 300,000 are read"),
        (b'{"prompt": "' + b"a" * (17 << 20) + b'"}', "at most 16,777,216 are read"),
        (b'{"prompt": NaN}', "p.jsonl:1"),
        (b'{"prompt": "\\ud800"}', "p.jsonl:1"),
        (b"\x00\x1b[2J", "p.jsonl:1"),
    ],
)
def test_a_hostile_line_is_named(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    with pytest.raises(RayppError) as raised:
        read_prompts(file)
    assert told in str(raised.value) and "\x1b" not in str(raised.value) and len(str(raised.value)) < 1000


def test_a_fifo_is_no_file_of_prompts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    with pytest.raises(RayppError, match="is a FIFO"):
        read_prompts(tmp_path / "p.jsonl")


def test_a_generation_config_is_read_within_bounds(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, **SIZES)
    config = tmp_path / "generation_config.json"
    config.write_text('{"eos_token_id": [' + ",".join(["5"] * 5000) + "]}")
    assert len(find_source(str(tmp_path)).eos_ids) == 1000
    config.write_text('{"eos_token_id": ' + "[" * 50_000)
    with pytest.raises(RayppError, match=r"generation_config.json"):
        find_source(str(tmp_path))
    config.write_bytes(b" " * (5 << 20))
    with pytest.raises(RayppError, match="more than 4,194,304 bytes"):
        find_source(str(tmp_path))
