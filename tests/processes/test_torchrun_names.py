"""torchrun on a machine whose own name does not resolve, as in most containers."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from programs import run_program

from raypp.errors import UnreachableError
from raypp.rank.joining import process_group

ROOT = Path(__file__).parents[2]
HANG_S = 400


def test_the_line_of_the_readme_works_under_a_name_that_does_not_resolve() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    (line,) = [one for one in (ROOT / "README.md").read_text().splitlines() if one.startswith("torchrun ")]
    options = line.split(" -m raypp.rank")[0].replace("--nproc-per-node 4", "--nproc-per-node 1").split()[1:]
    under = ["unshare", "--uts", "sh", "-c", 'hostname raypp-nowhere.invalid && exec "$@"', "sh"]
    torchrun = (sys.executable, "-m", "torch.distributed.run", *options, "-m", "raypp.rank", "--help")
    done = run_program(*under, *torchrun, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=HANG_S)
    assert "Run one rank of a job without Ray" in done.stdout


def test_a_rank_names_the_address_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_NAME_S", 0.0)
    with pytest.raises(UnreachableError, match=r"'raypp-nowhere.invalid', the name of rank 0's machine"):
        process_group._wait_for_server("raypp-nowhere.invalid", 1, HANG_S)
