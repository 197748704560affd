"""Several users of one directory store."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import run_python

from raypp.errors import DataError
from raypp.rank.data.tokens import BlockCache
from raypp.storage import StoreError
from raypp.storage.directory import DirectoryStore
from raypp.storage.node_cache import made_once

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as several users")

_AS_OTHERS = """
import os, sys
from pathlib import Path
from raypp.state.checkpoint.commit import claim_next_attempt
from raypp.storage import AccessRefused
from raypp.storage.directory import DirectoryStore
os.umask(0o022)
store = DirectoryStore(Path(sys.argv[1]))

def begin(user):
    os.seteuid(0)
    os.seteuid(user)

for user in map(int, sys.argv[2:]):
    begin(user)
    run = f"run-{user}"
    assert claim_next_attempt(store, run) == 1
    def chunks():
        yield b"12"
        assert [left.key for left in store.unfinished()] == [f"{run}/step-1/a"], list(store.unfinished())
        yield b"34"
    store.put_stream(f"{run}/step-1/a", chunks(), 4)
    assert store.get(f"{run}/step-1/a") == b"1234"
    store.probe()
first, second = sys.argv[2:]
begin(int(second))
for use in (lambda: store.put(f"run-{first}/step-1/b", b""), lambda: store.get(f"run-{first}/step-1/a"),
            lambda: list(store.list(f"run-{first}/"))):
    try:
        use()
        sys.exit("not refused")
    except AccessRefused as error:
        print(str(error).partition("let this user read and write ")[2])
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may write to; pytest's own are private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def act(folder: Path, *users: int) -> list[str]:
    return run_python("-c", _AS_OTHERS, str(folder), *map(str, users)).stdout.splitlines()


def test_a_second_user_writes_too_and_learns_which_folder_of_the_first_is_private(shared: Path) -> None:
    reported = act(shared, 65533, 65534)
    assert set(reported) <= {f"{shared}/run-65533/step-1", f"{shared}/run-65533/attempts"}
    assert len(reported) == 3
    assert {path.stat().st_mode & 0o777 for path in shared.glob(".raypp-incoming*")} == {0o700}


@pytest.mark.slow
def test_a_user_writes_where_root_was_first(shared: Path) -> None:
    DirectoryStore(shared).put("run/a", b"")
    assert len(act(shared, 65533, 65534)) == 3


@pytest.mark.slow
def test_a_file_that_is_private_is_named(shared: Path) -> None:
    (shared / "run").mkdir(mode=0o755)
    (shared / "run" / "a").write_bytes(b"")
    (shared / "run" / "a").chmod(0o600)
    script = """
import os, sys
from pathlib import Path
from raypp.storage.directory import DirectoryStore
os.seteuid(65534)
DirectoryStore(Path(sys.argv[1])).get("run/a")
"""
    done = run_python("-c", script, str(shared), code=1)
    assert f"let this user read and write {shared}/run/a" in done.stderr


@pytest.mark.slow
def test_a_run_that_does_not_exist_is_reported_as_such_beside_the_private_run_of_another(shared: Path) -> None:
    (shared / "theirs" / "attempts").mkdir(parents=True)
    (shared / "theirs" / "attempts").chmod(0o700)
    script = """
import os, sys
from raypp.control.find_run import find_run
os.environ["RAYPP_HOME"] = sys.argv[1] + "/home"
os.seteuid(65534)
find_run(sys.argv[1] + "/typo")
"""
    done = run_python("-c", script, str(shared), code=1)
    assert f"there is no run 'typo' below {shared}" in done.stderr, done.stderr


_REPLACED = """
import os, sys
from pathlib import Path
from raypp.storage import StoreError
from raypp.storage.directory import DirectoryStore
root, mode = Path(sys.argv[1]), int(sys.argv[3], 8)
os.umask(0)
os.seteuid(65533)
(root / sys.argv[2]).mkdir(mode=mode)
os.seteuid(0)
os.seteuid(65534)
store = DirectoryStore(root)
for write in (lambda: store.put("run/step-1/COMMIT", b"1", if_absent=True), lambda: store.put("run/spec.json", b"1")):
    try:
        write()
        sys.exit("not refused")
    except StoreError as error:
        print(error)
os.seteuid(0)
print(sorted(path.name for path in root.rglob("*") if path.is_file()))
"""


@pytest.mark.parametrize("name", [".raypp-incoming-65534", "run"])
def test_a_folder_that_a_stranger_made_first_is_refused_by_name(shared: Path, name: str) -> None:
    reported = run_python("-c", _REPLACED, str(shared), name, "777").stdout
    assert reported.count(f"{shared}/{name}: belongs to user 65533: others could replace") == 2
    assert reported.endswith("[]\n"), "nothing is left there"


def test_an_own_folder_that_others_may_write_to_is_refused_by_name(shared: Path) -> None:
    store = DirectoryStore(shared)
    store.put("run/a", b"")
    incoming = shared / f".raypp-incoming-{os.geteuid()}"
    incoming.chmod(0o777)
    with pytest.raises(StoreError, match=f"{incoming.name}: has mode 0777: others could replace"):
        store.put("run/b", b"")
    incoming.chmod(0o755)  # what some file systems give every folder
    store.put("run/b", b"")


@pytest.mark.parametrize("made", ["tokens", "tokens/entry"])
def test_entries_of_a_shared_cache_that_a_stranger_made_are_refused_by_name(
    shared: Path, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPP_CACHE_DIR", str(shared))
    (shared / "tokens").mkdir(mode=0o755)
    (shared / made).mkdir(mode=0o755, exist_ok=True)
    os.chown(shared / made, 65533, 65533)
    with pytest.raises(DataError, match=f"{made}: belongs to user 65533: .*\n  fix: set RAYPP_CACHE_DIR"):
        made_once(shared / "tokens" / "entry", lambda room: (room / "tokens").touch())
    with pytest.raises(DataError, match=f"{made}: belongs to user 65533"):
        BlockCache(shared / made)


def test_a_shared_cache_serves_the_user_who_made_its_entries(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPP_CACHE_DIR", str(shared))
    for _ in range(2):
        entry = made_once(shared / "tokens" / "entry", lambda room: (room / "tokens").touch())
    (shared / "tokens").chmod(0o777)
    with pytest.raises(DataError, match="tokens: has mode 0777"):
        made_once(entry, lambda room: None)
