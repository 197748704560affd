"""Creates an environment with other projects' checkpoint writers in the user's cache directory."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

PLACE = Path("~/.cache/raypp/benchmark-writers").expanduser()
# s3fs needs a lower bound: with a given boto3, pip would silently choose a version from 2020.
_PACKAGES = (["s3fs>=2024.6"], ["--no-deps", "s3torchconnector", "s3torchconnectorclient", "tenacity"])


def python_with_writers() -> tuple[Path | None, str]:
    """Returns a Python with its own s3fs and s3torchconnector, and the torch of this environment.

    Returns:
        The interpreter or None, and a text with its versions or the reason for None.
    """
    python = PLACE / "bin" / "python"
    check = "import s3fs, s3torchconnector.dcp, torch; print(s3fs.__version__, s3torchconnector.__version__)"
    # It lacks what this environment had when it was made, so another one needs a new one.
    complete, ours = PLACE / "complete", sysconfig.get_paths()["purelib"]
    if not complete.exists() or complete.read_text() != ours:
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(PLACE)], check=True, capture_output=True)
            site = next((PLACE / "lib").glob("python*")) / "site-packages"
            (site / "torch-from-outside.pth").write_text(f"{ours}\n")
            for packages in _PACKAGES:
                subprocess.run(
                    [str(python), "-m", "pip", "install", "--quiet", *packages],
                    check=True, capture_output=True, timeout=240,
                )  # fmt: skip
            complete.write_text(ours)
        except (subprocess.SubprocessError, OSError) as error:
            return None, f"skipped: the packages could not be installed ({error})"
    done = subprocess.run([str(python), "-c", check], capture_output=True, text=True, check=False)
    if done.returncode:
        return None, f"skipped: {done.stderr.strip().splitlines()[-1]}"
    return python, "s3fs {}, s3torchconnector {}".format(*done.stdout.split())
