"""A worker's process may use CUDA: the fork server, from which it comes, has loaded a CUDA build of
torch, and has not started the driver. CUDA does not work in a process whose parent has.

In place of the driver is a library that the tests compile. It notes who loads and who starts it.
One that is too old is named.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from programs import run_python
from test_forked_workers import SCRIPT, Node

_DRIVER = """
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void note(const char *what) {
    int file = open(getenv("DRIVER_NOTES"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    dprintf(file, "%d %s\\n", getpid(), what);
    close(file);
}
__attribute__((constructor)) static void loaded(void) { note("loads"); }

int cuInit(unsigned flags) { note("starts"); return 100; }  /* there is no device */
static int version(int *found) { *found = VERSION; return 0; }
static int none(void) { return 100; }

int cuGetProcAddress_v2(const char *name, void **found, int of, unsigned long flags, int *status) {
    int starts = !strcmp(name, "cuInit"), asks = !strcmp(name, "cuDriverGetVersion");
    int looks = !strncmp(name, "cuGetProcAddress", 16);
    *found = starts ? (void *)cuInit : asks ? (void *)version : looks ? (void *)cuGetProcAddress_v2 : (void *)none;
    if (status) *status = 0;
    return 0;
}
"""


pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is no CUDA build: it loads no driver")
_ASK = "from raypp.rank.device_check import why_no_card; print(why_no_card())"


def with_driver(folder: Path, version: int) -> dict[str, str]:
    """Returns the variables of a process that finds a driver of this version without a device."""
    (driver := folder / "driver").mkdir()
    build = ["cc", "-shared", "-fPIC", f"-DVERSION={version}", "-x", "c", "-", "-o", str(driver / "libcuda.so.1")]
    subprocess.run(build, input=_DRIVER, text=True, check=True)
    return {"LD_LIBRARY_PATH": str(driver), "DRIVER_NOTES": str(folder / "notes")}


def test_a_driver_older_than_torchs_cuda_is_named(tmp_path: Path) -> None:
    found = run_python("-c", _ASK, env={**os.environ, **with_driver(tmp_path, 11040)})
    assert found.stdout.strip() == "The NVIDIA driver on your system is too old (found version 11040)"


def test_only_a_workers_own_process_starts_the_driver(tmp_path: Path) -> None:
    notes, variables = tmp_path / "notes", with_driver(tmp_path, 13000)
    node = Node(tmp_path)
    try:
        node.worker("plain.json", **variables)
        (server,) = node.servers()
        assert notes.read_text() == f"{server.pid} loads\n"
        (tmp_path / "worker.py").write_text(f"import torch\ntorch.cuda.is_available()\n{SCRIPT}")
        worker = node.worker("asks.json", **variables)
        assert notes.read_text() == f"{server.pid} loads\n{worker['pid']} starts\n"
    finally:
        node.raylet.kill()
        node.raylet.wait()
        for server in node.servers():
            server.wait(30)
