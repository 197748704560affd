"""torchrun on a machine whose own name does not resolve, as in most containers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from raypp.errors import UnreachableError
from raypp.train import process_group
from raypp.train.unresolved_name import asks_for_name

ROOT = Path(__file__).parents[2]
GROUP = "torchrun.handlers"
HANG_S = 400


@pytest.fixture
def torchrun(tmp_path: Path):
    """Runs torchrun beside raypp's entry points, under a name that does not resolve."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    installed = tmp_path / "raypp_points-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: raypp-points\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[{GROUP}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        under = ["unshare", "--uts", "sh", "-c", 'hostname raypp-nowhere.invalid && exec "$@"', "sh"]
        return subprocess.run(
            [*under, sys.executable, "-m", "torch.distributed.run", *arguments],
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    return run


@pytest.mark.parametrize("more", [(), pytest.param(("--standalone",), marks=pytest.mark.slow)])
def test_a_wait_of_ten_minutes_becomes_a_sentence(more: tuple[str, ...], torchrun) -> None:
    done = torchrun(*more, "--nproc-per-node", "2", "-m", "raypp.train", "--job", "any.yaml")
    assert done.returncode == 2, done.stderr
    assert "raypp: this machine's name, 'raypp-nowhere.invalid', does not resolve" in done.stderr
    assert "fix: torchrun --local-addr 127.0.0.1" in done.stderr


def test_the_line_of_the_readme_works(torchrun) -> None:
    (line,) = [one for one in (ROOT / "README.md").read_text().splitlines() if one.startswith("torchrun ")]
    options = line.split(" -m raypp.train")[0].replace("--nproc-per-node 4", "--nproc-per-node 1").split()[1:]
    done = torchrun(*options, "-m", "raypp.train", "--help")
    assert done.returncode == 0, done.stderr
    assert "Run one rank of a job without Ray" in done.stdout


@pytest.mark.slow
@pytest.mark.gate
def test_other_programs_are_left_alone(torchrun, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("print('ran')")
    done = torchrun("--master-port", "29541", "--nproc-per-node", "1", str(tmp_path / "other.py"))
    assert (done.returncode, done.stdout, "raypp" in done.stderr) == (0, "ran\n", False), done.stderr


@pytest.mark.parametrize(
    ("options", "asks"),
    [
        ("--nproc-per-node 4", True),
        ("--standalone --nproc-per-node=4", True),
        ("--rdzv_backend=c10d --nnodes 2", True),
        ("--nnodes 1:1", True),
        ("--nnodes 2", False),
        ("--nnodes=2 --rdzv-endpoint head:29400", False),
        ("--master-port 29501", False),
        ("--standalone --local-addr 127.0.0.1", False),
    ],
)
def test_torchrun_asks_for_the_machine_s_name_unless_it_is_given_an_address(options: str, asks: bool) -> None:
    line = ["torchrun", *options.split(), "-m", "raypp.train", "--job", "x"]
    assert asks_for_name(line, "2.13.0+cpu") is asks
    assert asks_for_name(["torchrun", *options.split(), "other.py"], "2.13.0") is False
    if asks and "c10d" not in options:
        assert asks_for_name(line, "2.11.0") is ("standalone" in options)


def test_a_rank_names_the_address_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_NAME_S", 0.0)
    with pytest.raises(UnreachableError, match=r"'raypp-nowhere.invalid', the name of rank 0's machine"):
        process_group._wait_for_server("raypp-nowhere.invalid", 1, HANG_S)
