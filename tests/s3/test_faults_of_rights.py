"""Keys that expire, are revoked or lose permissions during a run, and hosts with wrong clocks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from saving import PART, committed, saved
from seaweed import BUCKET

from raypp.control.clusters.seaweed import SeaweedServer
from raypp.state.checkpoint.layout import rank_key
from raypp.storage import AccessRefused, StoreError
from raypp.storage.s3 import S3Store

pytestmark = pytest.mark.slow
ALL = ["Admin", "Read", "Write", "List", "Tagging"]


class Identities:
    """A server whose identities can change while it runs: it reads its file again on SIGHUP."""

    def __init__(self, directory: Path) -> None:
        self.server = SeaweedServer.start(directory, buckets=(BUCKET,))
        self._file = directory / "s3.json"

    def set(self, *, taken_back: str = "", **actions: list[str]) -> None:
        """Makes exactly these access keys valid from now on. Secret keys are `secret-of-NAME`."""
        rows = [("raypp", self.server.access_key, self.server.secret_key, ALL)]
        rows += [(name, name, f"secret-of-{name}", allowed) for name, allowed in actions.items()]
        if taken_back:
            # The server keeps identities that its file drops, so a revoked key gets another secret.
            rows.append((taken_back, taken_back, "another", ALL))
        identities = [
            {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": allowed}
            for name, key, secret, allowed in rows
        ]
        self._file.write_text(json.dumps({"identities": identities}))
        os.kill(self.server.pid, signal.SIGHUP)
        for name in actions:
            self.wait(lambda name=name: self.may(name, "list_objects_v2"))
        if taken_back:
            self.wait(lambda: self.may(taken_back, "list_objects_v2"), False)

    def may(self, name: str, operation: str, **request: Any) -> bool:
        client = self.store(name)._clients.current
        try:
            getattr(client, operation)(Bucket=BUCKET, **request)
            return True
        except Exception:  # noqa: BLE001
            return False

    def store(self, name: str) -> S3Store:
        keys = {"access_key": name, "secret_key": f"secret-of-{name}"}
        return S3Store(BUCKET, "rights", endpoint=self.server.endpoint, part_bytes=PART, **keys)

    @staticmethod
    def wait(condition: Callable[[], bool], value: bool = True) -> None:
        end = time.monotonic() + 20
        while condition() != value:
            assert time.monotonic() < end, "the server did not take its new identities"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Identities]:
    running = Identities(tmp_path_factory.mktemp("identities"))
    try:
        yield running
    finally:
        running.server.stop(grace_s=0.2)


@pytest.mark.gate
def test_a_bucket_that_turns_read_only_fails_saves_in_words_and_loads_as_before(
    identities: Identities, run: str
) -> None:
    identities.set(writer=ALL)
    store = identities.store("writer")
    rank = saved(store, run, 1)
    identities.set(writer=["Read", "List"])
    identities.wait(lambda: identities.may("writer", "put_object", Key="x", Body=b""), False)
    rank.save(2)
    assert rank.saver.wait() == 1
    assert all(words in rank.failures() for words in (rank_key(run, 2, rank.attempt, 0), "access denied", "write"))
    assert rank.loads(store, 1)
    identities.set(writer=ALL)
    identities.wait(lambda: identities.may("writer", "put_object", Key="x", Body=b""))
    assert rank.save_and_wait(3), rank.failures()
    assert committed(store, run) == [1, 3]


def test_keys_that_are_replaced_in_the_middle_are_asked_for_anew(
    identities: Identities, run: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The profile's program returns keys without an expiry. Then the server revokes the first."""
    identities.set(first=ALL, second=ALL)
    handed_out = tmp_path / "keys.json"
    _hand_out(handed_out, "first")
    _use_profile(monkeypatch, tmp_path, f"cat {handed_out}", identities.server.endpoint)
    store = S3Store(BUCKET, "rights", part_bytes=PART)
    rank = saved(store, run, 1)

    identities.set(second=ALL, taken_back="first")
    with pytest.raises(AccessRefused, match="rejects the signature"):
        store.get("x")  # the program still returns the old keys
    _hand_out(handed_out, "second")
    assert rank.save_and_wait(2), rank.failures()
    assert rank.loads(store, 2)


def test_short_lived_keys_are_renewed_before_their_end(
    identities: Identities, run: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    identities.set(first=ALL, second=ALL)
    handed_out = tmp_path / "keys.json"
    _hand_out(handed_out, "first", lives_s=60)
    _use_profile(monkeypatch, tmp_path, f"cat {handed_out}", identities.server.endpoint)
    rank = saved(S3Store(BUCKET, "rights", part_bytes=PART), run, 1)
    _hand_out(handed_out, "second", lives_s=3600)
    assert rank.save_and_wait(2), rank.failures()
    identities.set(second=ALL, taken_back="first")
    assert rank.save_and_wait(3), rank.failures()


def test_a_program_for_keys_that_fails_is_named(
    identities: Identities, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _use_profile(monkeypatch, tmp_path, "false", identities.server.endpoint)
    with pytest.raises(StoreError, match="cannot get new credentials"):
        S3Store(BUCKET, "rights").get("x")


def _hand_out(path: Path, name: str, lives_s: float | None = None) -> None:
    keys: dict[str, Any] = {"Version": 1, "AccessKeyId": name, "SecretAccessKey": f"secret-of-{name}"}
    if lives_s is not None:
        keys["SessionToken"] = ""
        keys["Expiration"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + lives_s))
    path.with_suffix(".new").write_text(json.dumps(keys))
    path.with_suffix(".new").replace(path)


def _use_profile(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str, endpoint: str) -> None:
    config = folder / "config"
    config.write_text(
        f"[profile short]\ncredential_process = {program}\nregion = us-east-1\nendpoint_url = {endpoint}\n"
    )
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_PROFILE", "short")


# Clocks ---------------------------------------------------------------------------------------

_OTHER_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) { const char *s = getenv("CLOCK_SHIFT_S"); return s ? atol(s) : 0; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += shift();
    return result;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec; out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""

_SAVE = """
import sys, time
sys.path[:0] = {paths!r}
from saving import OneRank, committed, newest
from raypp.storage import open_store
run, steps, url = sys.argv[1], [int(step) for step in sys.argv[2].split(",")], sys.argv[3]
store = open_store(url)
rank = OneRank(store, run, keep=2)
for step in steps:
    assert rank.save_and_wait(step), rank.failures()
    assert rank.loads(store, step)
print(rank.attempt, committed(store, run), newest(store, run), int(time.time()))
"""


@pytest.fixture(scope="module")
def other_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a library that shifts the clock of a process by CLOCK_SHIFT_S."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make another clock with")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(_OTHER_CLOCK)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", folder / "clock.so", folder / "clock.c", "-ldl"], check=True
    )
    return folder / "clock.so"


def save_elsewhere(
    url: str, run: str, steps: str, shift_s: int, clock: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    program = _SAVE.format(paths=[str(here), str(here.parent / "servers")])
    return subprocess.run(
        [sys.executable, "-c", program, run, steps, url],
        env={
            **os.environ,
            **environment,
            "LD_PRELOAD": str(clock),
            "CLOCK_SHIFT_S": str(shift_s),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("kind", ["s3", "directory"])
def test_hosts_whose_clocks_differ_share_a_run_and_the_step_alone_says_what_is_newest(
    kind: str, identities: Identities, run: str, other_clock: Path, tmp_path: Path
) -> None:
    """The first attempt's clock is 10 minutes ahead, the second's 10 minutes behind."""
    url = f"s3://{BUCKET}/clocks" if kind == "s3" else str(tmp_path / "clocks")
    environment = identities.server.environment()
    ahead = save_elsewhere(url, run, "1,2", +600, other_clock, **environment)
    assert ahead.returncode == 0, ahead.stderr
    behind = save_elsewhere(url, run, "3,4", -600, other_clock, **environment)
    assert behind.returncode == 0, behind.stderr
    assert ahead.stdout.startswith("1 [1, 2] (2, [])")
    assert behind.stdout.startswith("2 [3, 4] (4, [])")
    assert int(ahead.stdout.split()[-1]) > int(behind.stdout.split()[-1]) + 600


def test_a_clock_that_is_hours_off_is_reported_as_such_by_a_server_that_minds(
    server: Any, run: str, other_clock: Path
) -> None:
    off = save_elsewhere(f"s3://{BUCKET}/clocks", run, "1", 4 * 3600, other_clock, **server.environment())
    if server.__class__.__name__ == "CephServer":
        assert off.returncode != 0
        assert "the clock of this machine and that of the server" in off.stderr
    else:
        assert off.returncode == 0 or "the clock of this machine" in off.stderr, off.stderr
