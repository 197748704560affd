"""Names that people bring from other trainers: each leads to a key that exists."""

from pathlib import Path

import pytest

from raypp.errors import JobError
from raypp.job.explain import explain
from raypp.job.job_file import load_job
from raypp.job.section import undotted
from raypp.job.wrong_values import field_at, other_names, translated

PAGE = Path(__file__).parents[3] / "docs" / "tasks" / "coming_from.md"
NAMES = other_names()


def test_every_target_is_a_key_and_the_page_has_every_line() -> None:
    rows = dict[tuple[str, str], list[str]]()
    for name, (key, how) in NAMES.items():
        assert field_at(undotted(key), {"model": {"kind": "qwen3_moe"}}) is not None, (name, key)
        rows.setdefault((key, how), []).append(f"`{name}`")
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    expected = []
    for (key, how), names in rows.items():
        ours = "–" if how.startswith("!") else f"`{key}`"
        remark = f" {how.removeprefix('! ')} " if how else " "
        expected.append(f"| {', '.join(names)} | {ours} |{remark}|")
    assert lines == expected


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("train.gradient_accumulation_steps", 8, "write pipeline.microbatches: the same value"),
        ("train.bf16", "true", "write train.precision: bf16"),
        ("train.max_epochs", 3, "write train.epochs: in place of train.steps"),
        ("mesh.tensor_parallel_size", 2, "write mesh.tp"),
        ("training_args.num_train_epochs", 3, "for num_train_epochs write train.epochs"),
        ("lora.rank", 8, "did you mean model.lora?"),
        ("nonsense", 2, "remove it; a job has: name"),
    ],
)
def test_an_unknown_key_is_answered_with_ours(key: str, value: object, fix: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    parts, text = key.split("."), f"{value}"
    for part in reversed(parts):
        text = f"{{{part}: {text}}}"
    path.write_text(f"name: a\n{text[1:-1]}\n")
    with pytest.raises(JobError) as of_file:
        load_job(path)
    path.write_text("name: a\n")
    with pytest.raises(JobError) as of_set:
        load_job(path, [f"{key}={value}"])
    for error in (of_file, of_set):
        assert fix in error.value.problems[0].fix, error.value


def test_explain_knows_them_and_other_words_stay_unknown() -> None:
    with pytest.raises(JobError, match=r"write train\.optimizer\.lr: the same value"):
        explain("learning_rate")
    assert not any(map(translated, ("steps", "nam", "fsdp", "x", "")))


def test_a_name_of_the_hub_is_answered_with_how_to_fetch_it(tmp_path: Path) -> None:
    from raypp.state.hf.from_hf import with_hf_sizes

    (tmp_path / "job.yaml").write_text("name: a\nmodel: {from_hf: Qwen/Qwen3-0.6B}\n")
    with pytest.raises(JobError, match=r"run `hf download Qwen/Qwen3-0\.6B --local-dir DIR`"):
        with_hf_sizes(load_job(tmp_path / "job.yaml"))
