"""Whatever a file holds, reading it ends with a result or a `RayppError`, without much work."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from counted_calls import counted_calls
from file_cases import CONFIG, LLAMA, MOE, Case, all_cases, model_file, special_files, use_data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raypp.cli.main import cli as command
from raypp.errors import DataError, JobError, RayppError
from raypp.job.models import DecoderOptions
from raypp.rank.data import source_files
from raypp.state.hf.config import options_from_config
from raypp.storage.node_cache import read_meta, read_offsets
from raypp.tools.export.tokenizer_files import tokenizer_files

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_MOST_CALLS = 5_000_000
_EVERY = 16
_GROUPS = 8


def _is_large(name: str) -> bool:
    return name.endswith(("many values", "over all files", "experts", "spaces", "nodes")) or "million" in name


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "room"))
    monkeypatch.setenv("RAYPP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("RAYPP_ADDRESS", raising=False)
    return tmp_path / "room"


def _try(name: str, case: Case, room: Path) -> str:
    """Runs a case in an empty folder; returns what is wrong with how it ended, or nothing."""
    room.mkdir()
    try:
        with counted_calls() as calls:
            case(room)
    except RayppError as error:
        if len(str(error)) > 6000 or _CONTROL.search(str(error)):
            return f"{name}: {len(str(error))} characters: {str(error)[:200]!r}"
    except Exception as error:  # noqa: BLE001 - all are reported together
        return f"{name}: {type(error).__name__}: {error}"
    finally:
        shutil.rmtree(room)
    return f"{name}: {calls.count:,} calls" if calls.count > _MOST_CALLS else ""


@pytest.mark.parametrize("group", range(_GROUPS))
def test_no_file_ends_a_command_otherwise_than_by_an_error_of_ours(room: Path, group: int) -> None:
    cases = all_cases()
    small = [name for name in cases if not _is_large(name)]
    odd = [name for name in small if re.search(r" \d+$", name)]
    chosen = sorted({*small} - {*odd}) + odd[::_EVERY]
    wrong = [shown for name in chosen[group::_GROUPS] if (shown := _try(name, cases[name], room))]
    assert not wrong, "\n".join(wrong)


_JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    base=st.sampled_from([CONFIG, MOE]),
    kind=st.sampled_from(
        [
            "llama", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "smollm3", "phi3", "mixtral", "stablelm",
            "starcoder2",
        ]
    ),
    changed=st.dictionaries(
        st.sampled_from([*MOE, "rope_scaling", "layer_types", "sliding_window"]), _JSON, max_size=3
    ),
)  # fmt: skip
def test_any_config_is_refused_by_name_or_has_valid_options(base: Any, kind: str, changed: Any) -> None:
    try:
        options = options_from_config({**base, "model_type": kind, **changed}, DecoderOptions(from_hf="there"), "there")
    except JobError as error:
        assert all(problem.key.startswith("model.") and "there" in problem.fault for problem in error.problems)
    else:
        assert options.num_layers >= 1


def _job_of(folder: Path) -> Path:
    path = folder / "job.yaml"
    path.write_text(f"name: hostile\nmodel: {{from_hf: {folder}}}\ndata: {{kind: synthetic, seq_len: 16}}\n")
    return path


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b'{"model_type": "llama", "num_hidden_layers": 1e9}', "hidden_size is missing"),
        ("config.json", json.dumps({**CONFIG, "num_hidden_layers": 10**9}).encode(), "at most 4,096 are supported"),
        ("config.json", json.dumps({**CONFIG, "hidden_size": -4}).encode(), "hidden_size is -4, not a positive"),
        ("config.json", json.dumps({**CONFIG, "rope_theta": "\x1b"}).encode(), "rope_theta is"),
        ("config.json", b"[" * 100_000, "is not JSON: recursion limit exceeded"),
        ("config.json", None, "config.json"),
    ],
)
def test_plan_names_the_file_and_the_key(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is None:
        next(special_files(tmp_path / name))[1]()
    else:
        (tmp_path / name).write_bytes(content)
    done = CliRunner().invoke(command, ["plan", str(_job_of(tmp_path))])
    shown = str(done.exception)
    assert isinstance(done.exception, RayppError), shown
    assert said in shown and name in shown and str(tmp_path) in shown


def test_import_names_the_file_and_the_tensor_and_writes_nothing(tmp_path: Path) -> None:
    model, store = tmp_path / "model", tmp_path / "store"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    good = model_file(LLAMA)
    cases = {
        "is torn": good[:-1],
        "its header would have": b"\xff" * 8 + good[8:],
        "does not match its shape": good.replace(b"[0, 128]", b"[0, 120]", 1),
        "overlap": good.replace(b"[128, 192]", b"[120, 184]", 1),
    }
    for said, content in cases.items():
        (model / "model.safetensors").write_bytes(content)
        done = CliRunner().invoke(command, ["checkpoints", "import", str(model), f"{store}/run"])
        assert isinstance(done.exception, RayppError), (said, done.exception)
        assert said in str(done.exception) and "model.safetensors" in str(done.exception)
    (model / "model.safetensors").rename(model / "part.safetensors")
    index = {"weight_map": {"lm_head.weight": "../store/secret", "model.norm.weight": "part.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    done = CliRunner().invoke(command, ["checkpoints", "import", str(model), f"{store}/run"])
    assert "index.json: object key '../store/secret' is absolute, or has" in str(done.exception)
    assert not store.exists()


def test_a_text_has_a_longest_line_and_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (source_files, __import__("raypp.rank.data.text", fromlist=["text"])):
        monkeypatch.setattr(module, "MOST_TEXT_BYTES", 1000)
    monkeypatch.setattr(source_files, "_CHUNK", 100)
    path = tmp_path / "a.txt"
    for content, said in [("a\n\n" + "b" * 5000, "a.txt:3: the line"), ("a\n\n" + "b\n" * 900, "a.txt:3: the para")]:
        path.write_text(content)
        with pytest.raises(DataError, match=re.escape(said)):
            use_data("text", str(path))
    path.write_text("b" * 900 + "\n" + "\n" + "c" * 900)
    use_data("text", str(path))


def test_a_search_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("a")
    monkeypatch.setattr(source_files, "MOST_FILES", 20)
    with pytest.raises(DataError, match="has more than 20 files"):
        source_files.find_files(str(tmp_path), (".txt",))
    with pytest.raises(DataError, match="has more than 20 files"):
        source_files.find_files(f"{tmp_path}/*.txt", (".txt",))
    assert len(source_files.find_files(f"{tmp_path}/1*.txt", (".txt",))) == 11


def test_a_damaged_cache_entry_is_named(tmp_path: Path) -> None:
    for text, said in [
        ("{", "is not JSON"),
        ('{"digest": 3}', "digest is 3"),
        ('{"digest": "a", "dtype": "O"}', "dtype"),
    ]:
        (tmp_path / "meta.json").write_text(text)
        with pytest.raises(DataError, match=said):
            read_meta(tmp_path, "data.path")
    next(special_files(tmp_path / "offsets.npy"))[1]()
    with pytest.raises(DataError, match=r"offsets\.npy is a FIFO"):
        read_offsets(tmp_path, 3, "data.path")


@pytest.mark.parametrize("data", [None, [], "text", {"tokenizer": 3}, {"tokenizer": "/dev/zero"}, {"seq_len": "x"}])
def test_the_tokenizer_of_a_strange_job_is_left_out_and_reported(data: Any) -> None:
    found = tokenizer_files({"data": data}, None, DecoderOptions())
    assert found.files == {} and found.ids["eos_id"] is None
    assert found.remarks and all("exported" in remark for remark in found.remarks)
