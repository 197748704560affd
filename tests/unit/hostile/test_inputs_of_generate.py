"""Prompts and model folders of others: refused in words, within bounds, and shown harmlessly."""

from pathlib import Path

import pytest
from hf_folder import write_hf_folder

from raypp.errors import RayppError
from raypp.tools.inference.source import find_source

SIZES = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "ffn_size": 8, "vocab_size": 11}


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
