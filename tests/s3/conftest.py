"""Real S3 servers, one of each kind for all tests here, and a fault proxy before one of them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "servers"))

if TYPE_CHECKING:
    from fault_proxy import FaultProxy

    from raypp.control.clusters.seaweed import SeaweedServer

_RUNS = (f"run-{number}" for number in itertools.count())


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[SeaweedServer]:
    """SeaweedFS, the server that raypp starts on a laptop."""
    from seaweed import BUCKET, seaweed

    with seaweed() as running:
        running.store(BUCKET, "warm-up").put("a", b"the first write makes the server's volumes")
        yield running


@pytest.fixture(scope="session", params=["seaweed", pytest.param("ceph", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest):
    """Each kind of server. As in production, they differ in conditional writes and checksums."""
    if request.param == "seaweed":
        yield request.getfixturevalue("seaweed_server")
        return
    from ceph import PACKAGES, ceph, missing_programs
    from seaweed import BUCKET

    missing = missing_programs()
    if missing:
        pytest.skip(f"Ceph is not on this machine (no {', '.join(missing)}); on Debian: {PACKAGES}")
    with ceph(BUCKET) as running:
        yield running


@pytest.fixture
def run() -> str:
    return next(_RUNS)


@pytest.fixture
def in_seaweed(seaweed_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sets the credentials of SeaweedFS for this process, and a cache of its own."""
    for name, value in seaweed_server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAYPP_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def proxy(seaweed_server: SeaweedServer) -> Iterator[FaultProxy]:
    from fault_proxy import fault_proxy

    with fault_proxy(seaweed_server.endpoint) as running:
        yield running
