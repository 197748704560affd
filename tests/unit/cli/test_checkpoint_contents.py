"""checkpoints show, diff, export and import, on checkpoints in directories."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_folder import write_hf_folder
from safetensors.numpy import load_file, save_file

from raypp.cli.main import run
from raypp.records import Event
from raypp.state.checkpoint.commit import read_commit, write_commit
from raypp.state.checkpoint.layout import rank_key
from raypp.state.run_records.recorder import RunRecorder
from raypp.storage.directory import DirectoryStore

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 24, "vocab_size": 300,
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAYPP_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)


def model(folder: Path, seed: int = 0, **changed: Any) -> dict[str, np.ndarray]:
    return write_hf_folder(folder, seed, **{**SIZES, **changed})


def job(tmp_path: Path, **sizes: Any) -> Path:
    lines = [f"  {name}: {value}" for name, value in {**SIZES, **sizes}.items()]
    path = tmp_path / "job.yaml"
    path.write_text(
        "\n".join(["name: tuned", "model:", *lines, "data: {kind: synthetic}", f"checkpoint: {{url: {tmp_path}/s}}"])
    )
    return path


def reported(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_show_names_every_tensor_and_who_holds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(tmp_path / "hf", kind="mixtral", num_experts=4, experts_per_token=2, expert_ffn_size=8)
    assert run(["checkpoints", "import", "hf", f"{tmp_path}/s/moe"]) == 0
    assert "step 0 is committed" in capsys.readouterr().out
    assert run(["checkpoints", "show", f"{tmp_path}/s/moe", "--json"]) == 0
    shown = reported(capsys)
    assert (shown["run"], shown["step"], shown["attempt"], shown["data_position"]) == ("moe", 0, 1, None)
    tensors = {one["name"]: one for one in shown["tensors"]}
    assert tensors["model.layers.0.block_sparse_moe.experts.w1"] == {
        "name": "model.layers.0.block_sparse_moe.experts.w1",
        "dtype": "F32",
        "shape": [4, 8, 16],
        "bytes": 2048,
        "ranks": [0],
    }
    for place in ("s/moe/step-0", f"{tmp_path}/s/moe/step-00000000"):
        assert run(["checkpoints", "show", place]) == 0
        out = capsys.readouterr().out
        assert "moe, step 0" in out and "4 × 8 × 16" in out and "lm_head.weight" in out
    assert run(["checkpoints", "show", "s/moe/step-3"]) == 2
    assert "step 3 of moe is not committed" in capsys.readouterr().err


def test_diff_shows_what_differs_and_by_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = model(tmp_path / "a")
    model(tmp_path / "b")
    changed = load_file(tmp_path / "b" / "model.safetensors")
    changed["model.norm.weight"] = changed["model.norm.weight"].copy()
    changed["model.norm.weight"][3] += 0.5
    changed["lm_head.weight"] = changed["lm_head.weight"].copy()
    changed["lm_head.weight"][0, 0] = np.nan
    save_file(changed, tmp_path / "b" / "model.safetensors")
    model(tmp_path / "tied", tie_embeddings=True, vocab_size=310)
    for name in ("a", "b", "tied"):
        assert run(["checkpoints", "import", name, f"s/{name}"]) == 0
    capsys.readouterr()
    assert run(["checkpoints", "diff", "s/a", "s/a/step-0"]) == 0
    assert f"{len(tensors)} tensors are bitwise equal, 0 are not" in capsys.readouterr().out
    assert run(["checkpoints", "diff", "s/a", "s/b", "--json"]) == 1
    found = reported(capsys)
    assert found["equal"] == len(tensors) - 2 and not found["only_a"] and not found["same"]
    by_name = {one["name"]: one for one in found["different"]}
    norm = by_name["model.norm.weight"]
    assert (norm["elements"], norm["of"]) == (1, 16) and norm["max_abs"] == pytest.approx(0.5)
    was = float(tensors["model.norm.weight"][3])
    assert norm["max_rel"] == pytest.approx(0.5 / max(abs(was), abs(was + 0.5)))
    assert np.isnan(by_name["lm_head.weight"]["max_abs"])
    assert run(["checkpoints", "diff", "s/a", "s/b"]) == 1
    assert "1 of 16" in capsys.readouterr().out
    assert run(["checkpoints", "diff", "s/a", "s/tied"]) == 1
    out = capsys.readouterr().out
    assert "only in A: lm_head.weight" in out
    assert "model.embed_tokens.weight: F32 [300, 16] in A, F32 [310, 16] in B" in out


def test_a_corrupt_checkpoint_is_neither_compared_nor_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model(tmp_path / "a")
    assert run(["checkpoints", "import", "a", "s/a"]) == 0
    path = DirectoryStore(tmp_path / "s").root / rank_key("a", 0, 1, 0)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    for command in (["diff", "s/a", "s/a"], ["export", "s/a", "out"]):
        assert run(["checkpoints", *command]) == 1
        assert "rank-00000.safetensors: is corrupt between bytes" in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_what_was_imported_is_exported_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model(tmp_path / "hf", kind="qwen3_moe", num_experts=3, experts_per_token=2, expert_ffn_size=8)
    assert run(["checkpoints", "import", "hf", "s/moe", "--json"]) == 0
    assert reported(capsys)["checkpoint"] == f"{tmp_path}/s/moe/step-00000000"
    assert run(["checkpoints", "export", "s/moe", "out", "--shard-gb", "0.000005", "--json"]) == 0
    assert reported(capsys)["tensors"] == len(before)
    after: dict[str, np.ndarray] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        after |= load_file(path)
    assert after.keys() == before.keys() and all(np.array_equal(after[name], before[name]) for name in before)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys() and len(set(index["weight_map"].values())) > 2
    assert run(["checkpoints", "export", "s/moe", "out"]) == 2
    assert "already contains a model" in capsys.readouterr().err
    assert run(["checkpoints", "export", "s/moe", "half", "--dtype", "bf16"]) == 0
    assert (tmp_path / "half" / "model.safetensors").stat().st_size < sum(t.nbytes for t in before.values())


def test_export_of_the_best_is_that_with_the_least_loss_of_what_is_still_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model(tmp_path / "hf")
    assert run(["checkpoints", "import", "hf", "s/mine", "--json"]) == 0
    capsys.readouterr()
    assert run(["checkpoints", "export", "s/mine", "out", "--best"]) == 2
    assert "no checkpoint of mine was evaluated" in capsys.readouterr().err
    store = DirectoryStore(tmp_path / "s")
    for step in (10, 20):
        model(tmp_path / f"hf-{step}", seed=step)
        assert run(["checkpoints", "import", f"hf-{step}", f"s/at-{step}", "--json"]) == 0
        commit, objects = read_commit(store, f"at-{step}", 0), []
        for one in commit.objects:
            objects.append(replace(one, key=rank_key("mine", step, 1, one.rank)))
            store.put(objects[-1].key, store.get(one.key))
        write_commit(store, replace(commit, run="mine", step=step, objects=tuple(objects)))
    with RunRecorder(store, "mine", "a1") as recorder:
        for step, loss in ((10, 1.5), (20, 2.0), (15, 1.0)):  # step 15 was removed
            recorder.event(Event("evaluated", "", step=step, details={"loss": loss}))
    capsys.readouterr()
    assert run(["checkpoints", "export", "s/mine", "out", "--best", "--json"]) == 0
    assert reported(capsys)["step"] == 10
    exported, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "hf-10"))
    assert all(np.array_equal(exported[name], theirs[name]) for name in theirs)
    assert run(["checkpoints", "export", "s/mine/step-20", "again", "--best"]) == 2
    assert "step 20 is named, too" in capsys.readouterr().err


def test_import_into_a_job_wants_the_jobs_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(tmp_path / "hf")
    assert run(["checkpoints", "import", "hf", str(job(tmp_path, hidden_size=32))]) == 1
    err = capsys.readouterr().err
    assert "model.embed_tokens.weight: has shape [300, 16] in" in err and "the job's model needs [300, 32]" in err
    assert run(["checkpoints", "import", "hf", str(job(tmp_path, num_layers=1))]) == 2
    assert "model.num_layers: is 1, but" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()
    assert run(["checkpoints", "import", "hf", str(job(tmp_path, norm_eps=1e-5))]) == 0
    assert "raypp submit" in capsys.readouterr().out
    assert run(["checkpoints", "list", "s/tuned", "--json"]) == 0
    assert [row["step"] for row in reported(capsys)] == [0]
