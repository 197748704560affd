"""Follows docs/tasks/add_a_family.md exactly in a copy of the project, and tests a user-defined
model.

The page's example is a family that transformers has and raypp does not: Seed-OSS. Its two files are
those on the page.
"""

import json
import re
from pathlib import Path

import pytest
import recipes

ROOT = Path(__file__).parents[2]

PAGE = (ROOT / "docs/tasks/add_a_family.md").read_text(encoding="utf-8")
BLOCKS = dict(reversed(re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)))
FAMILY, CASES = BLOCKS["python"], BLOCKS[""]
OWN = '''"""A model of a user's own: Llama with twice the feed-forward width, and a key of its own."""

from raypp.stages.models.layers import Attention, DecoderLayer, GatedFeedForward
from raypp.stages.models.stage import DecoderStage


def layer(options, index):
    inner = options.times * options.ffn_size
    return DecoderLayer(options, Attention(options), GatedFeedForward(options.hidden_size, inner))


def build(options, layers, first, last):
    return DecoderStage(options, layers, first, last, layer)
'''
JOB = """
name: recipe
model: {{kind: "{kind}", num_layers: 3, hidden_size: 32, num_heads: 4, num_kv_heads: 2, ffn_size: 48, vocab_size: 97}}
data: {{kind: synthetic, num_documents: 200, document_len: [3, 30], seq_len: 32}}
mesh: {{pp: 2}}
pipeline: {{microbatches: 4, lookahead: 0}}
train: {{steps: 3, micro_batch_size: 2}}
checkpoint: {{url: {place}/store, every_steps: 0, memory_tier: false}}
resources: {{device: cpu}}
"""


def python_in(place: Path, *arguments: str) -> str:
    done = recipes.python_in(place, *arguments, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("family")
    files = {
        "raypp/job/families/seed_oss.py": FAMILY,
        "tests/unit/families/cases/seed_oss.yaml": CASES,
        "job.yaml": JOB.format(kind="seed_oss", place=place),
    }
    return recipes.tree_with(place, files)


@pytest.mark.gate
def test_a_plan_counts_a_new_family(tree: Path) -> None:
    plan = json.loads(python_in(tree, "-m", "raypp", "plan", "job.yaml", "--json"))
    attention = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 32 + 2 * 16
    assert plan["parameters"] == 2 * 97 * 32 + 32 + 3 * (attention + 2 * 32 + 3 * 32 * 48)
    assert "remarks" not in plan
    assert "seed_oss" in python_in(tree, "-m", "raypp", "list-kinds", "model.kind")


@pytest.mark.slow
def test_two_ranks_train_a_new_family_like_one_process(tree: Path) -> None:
    answer = json.loads(python_in(tree, "-m", "raypp", "parity", "job.yaml", "--steps", "2", "--json"))
    assert answer["bitwise"] and answer["compared"] >= 30, answer


@pytest.mark.slow
def test_a_trained_new_family_is_exported_and_transformers_loads_it(tree: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "raypp.rank")
    python_in(tree, *ranks, "--job", "job.yaml")
    python_in(tree, "-m", "raypp", "checkpoints", "export", f"{tree}/store/recipe", "exported")
    model, notes = transformers.AutoModelForCausalLM.from_pretrained(tree / "exported", output_loading_info=True)
    assert type(model).__name__ == "SeedOssForCausalLM"
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"]


@pytest.mark.slow
def test_the_contract_tests_take_up_a_new_family_the_day_it_appears(tree: Path) -> None:
    contracts = ("tests/unit/families", "tests/unit/models/test_families_against_transformers.py")
    done = python_in(tree, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-k", "seed_oss", *contracts)
    for test in (
        "test_every_stage_has_the_parameters_that_are_declared[[2, 3]-plain-seed_oss]",
        "test_flops_are_those_that_torch_counts[plain-seed_oss]",
        "test_what_a_family_does_not_compute_is_refused_by_name[seed_oss]",
        "test_every_field_is_computed_as_transformers_does_or_refused_by_name[seed_oss]",
        "test_a_missing_key_means_what_transformers_takes_it_for[seed_oss]",
        "test_logits_gradients_and_an_optimizer_step_are_those_of_transformers[seed_oss-tied]",
        "test_two_stages_compute_the_bits_of_one[seed_oss-plain]",
        "test_import_then_no_step_then_export_gives_the_same_bytes[seed_oss-odd]",
    ):
        assert f"{test}\n" in done, done[-5000:]


@pytest.mark.gate
def test_a_model_of_ones_own_is_counted_as_it_is_built_and_trains_like_one_process(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "job.yaml").write_text(JOB.format(kind="my_models:build", place=tmp_path), encoding="utf-8")
    wider = ("--set", "model.times=2")
    plan = json.loads(python_in(tmp_path, "-m", "raypp", "plan", "job.yaml", "--json", *wider))
    layer = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 2 * 32 + 3 * 32 * 96
    assert plan["parameters"] == 2 * 97 * 32 + 32 + 3 * layer
    assert sum(rank["weights"] for rank in plan["memory"]) == 4 * plan["parameters"]
    assert plan["flops_per_token"] == 6 * (3 * (layer - 2 * 32) + 97 * 32) + 3 * 3 * 2 * 32 * 32
    assert "counted from the model it builds" in plan["remarks"][0]
    answer = json.loads(python_in(tmp_path, "-m", "raypp", "parity", "job.yaml", "--steps", "2", "--json", *wider))
    assert answer["bitwise"] and answer["compared"] >= 30, answer


def test_a_plan_says_of_a_model_that_cannot_be_built_that_it_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def build(options, layers, first, last):\n    raise ValueError('not yet')\n")
    (tmp_path / "job.yaml").write_text(JOB.format(kind="broken:build", place=tmp_path), encoding="utf-8")
    said = " ".join(python_in(tmp_path, "-m", "raypp", "plan", "job.yaml").split())
    assert "broken:build is not counted (ValueError: not yet (at " in said and "): parameters, memory" in said
