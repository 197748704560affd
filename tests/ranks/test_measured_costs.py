"""`raypp plan --measure` on this machine: the costs of a model's parts, and a plan by them."""

import json
from pathlib import Path

import pytest
import yaml
from training import document as small
from training import thinned

from raypp.cli.main import run


@pytest.mark.parametrize("precision", thinned(["fp32", "bf16_pure", "bf16"], [], ["fp32"]))
def test_a_models_parts_are_timed_and_a_plan_rests_on_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    job, costs = tmp_path / "job.yaml", tmp_path / "costs.json"
    document = small(
        pp=2, microbatches=4, schedule="zbv", pipeline={"stages_per_rank": 2},
        model={"hidden_size": 64, "num_kv_heads": 4, "ffn_size": 128, "vocab_size": 8192},
        data={"kind": "synthetic", "seq_len": 128, "document_len": [128, 128], "num_documents": 100},
        train={"steps": 1, "precision": precision}, checkpoint={"url": str(tmp_path / "store")},
    )  # fmt: skip
    job.write_text(yaml.safe_dump(document))
    assert run(["plan", str(job), "--measure", str(costs), "--json"]) == 0
    found = json.loads(costs.read_text())["costs"]
    assert found["kind"] == "cpu"
    assert found["layer"]["forward"] > 0 and found["layer"]["backward"] > 0
    assert all(found[name] > 0 for name in ("input_share", "weight_share", "optimizer_s"))
    printed = capsys.readouterr()
    (prediction,) = json.loads(printed.out)["predictions"]
    assert "costs" in prediction["measured"]
    least = 4 * 4 * (found["layer"]["forward"] + found["layer"]["backward"]) / 2
    assert prediction["step_s"] > least
