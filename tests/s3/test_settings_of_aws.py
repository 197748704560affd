"""Tests common AWS settings against a real server on loopback."""

import os
import secrets
import socket
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FaultProxy, Request
from saving import PART
from seaweed import BUCKET, seaweed

from raypp.control.clusters.seaweed import SeaweedServer, write_locks
from raypp.errors import JobError
from raypp.storage import open_store
from raypp.storage.s3 import S3Store
from raypp.storage.s3_client import S3Clients
from raypp.storage.store import AccessRefused


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "RAYPP_S3_", "RAYPP_STORE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def keys(seaweed_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed_server.secret_key)


def works(store: Any) -> bool:
    store.put_stream("settings/large", [bytes(PART + 1)], PART + 1)
    return len(store.get("settings/large")) == PART + 1 and store.get("settings/large", 5, 9) == bytes(4)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
@pytest.mark.usefixtures("keys")
def test_the_endpoint_comes_from_a_variable_and_buckets_are_addressed_by_path(
    name: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, proxy.endpoint)
    store = open_store(f"s3://{BUCKET}/by-variable")
    assert works(store)
    assert all(request.target.startswith(f"/{BUCKET}") for request in proxy.seen)
    assert isinstance(store, S3Store) and store.endpoint == proxy.endpoint


@pytest.mark.gate
def test_a_profile_gives_endpoint_keys_region_and_style(
    proxy: FaultProxy, seaweed_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = eu-central-1\nservices = lab\ns3 =\n    addressing_style = path\n"
        f"[services lab]\ns3 =\n    endpoint_url = {proxy.endpoint}\n"
    )
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {seaweed_server.access_key}\naws_secret_access_key = {seaweed_server.secret_key}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert works(open_store(f"s3://{BUCKET}/by-profile"))
    assert all("/eu-central-1/s3/" in request.headers["authorization"] for request in proxy.seen)


@pytest.mark.gate
@pytest.mark.usefixtures("keys")
def test_aws_region_counts_and_is_what_requests_are_signed_for(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    open_store(f"s3://{BUCKET}/region").put("a", b"")
    monkeypatch.setenv("AWS_REGION", "ap-south-1")
    open_store(f"s3://{BUCKET}/region").put("a", b"")
    assert "/us-west-2/s3/" in proxy.seen[0].headers["authorization"]
    assert "/ap-south-1/s3/" in proxy.seen[-1].headers["authorization"]


@pytest.fixture
def names_below_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolves names below localhost to this machine (RFC 6761), as some resolvers do not."""
    try:
        socket.getaddrinfo(f"{BUCKET}.localhost", 80)
    except OSError:
        real = socket.getaddrinfo
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, *more, **named: real(
                "127.0.0.1" if str(host).endswith(".localhost") else host, *more, **named
            ),
        )


@pytest.mark.gate
@pytest.mark.usefixtures("keys", "names_below_localhost")
def test_virtual_host_style_asks_the_buckets_own_name(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    port = proxy.endpoint.rpartition(":")[2]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://localhost:{port}")
    monkeypatch.setenv("RAYPP_S3_ADDRESSING_STYLE", "virtual")
    store = open_store(f"s3://{BUCKET}/virtual")
    # The server ignores the host name unless its own domain is configured, so the test checks what
    # is sent.
    proxy.add(lambda _request: True, times=None, status=403, code="AccessDenied")
    with pytest.raises(Exception, match="access denied"):
        store.get("a/b")
    assert proxy.seen[-1].headers["host"] == f"{BUCKET}.localhost:{port}"
    assert proxy.seen[-1].target == "/virtual/a/b"


@pytest.mark.gate
@pytest.mark.usefixtures("names_below_localhost")
def test_virtual_host_style_works_on_a_server_that_knows_its_domain(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server.__class__.__name__ != "CephServer":
        pytest.skip("SeaweedFS knows no domain; the Ceph of these tests is `localhost`")
    for key, value in server.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint.replace("127.0.0.1", "localhost"))
    monkeypatch.setenv("RAYPP_S3_ADDRESSING_STYLE", "virtual")
    assert works(open_store(f"s3://{BUCKET}/virtual"))


@pytest.mark.gate
@pytest.mark.usefixtures("keys")
def test_the_requester_says_that_he_pays_with_every_request(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    monkeypatch.setenv("RAYPP_S3_REQUEST_PAYER", "requester")
    store = open_store(f"s3://{BUCKET}/payer")
    assert works(store)
    assert list(store.list("settings/"))
    store.delete(["settings/large"])
    assert all(request.headers.get("x-amz-request-payer") == "requester" for request in proxy.seen)


@pytest.mark.gate
@pytest.mark.usefixtures("keys")
def test_every_write_carries_what_a_policy_wants(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    owner, sse = ("x-amz-acl", "bucket-owner-full-control"), ("x-amz-server-side-encryption", "AES256")
    policy = proxy.add(lambda one: _lacks(one, *owner), times=None, status=403, code="AccessDenied")
    with pytest.raises(AccessRefused, match=r"RAYPP_S3_ENCRYPTION \(AES256, aws:kms\) or RAYPP_S3_ACL"):
        open_store(f"s3://{BUCKET}/policy").put("a", b"a")
    monkeypatch.setenv("RAYPP_S3_ACL", owner[1])
    refused = policy.hits
    proxy.seen.clear()
    store = open_store(f"s3://{BUCKET}/policy")
    assert isinstance(store, S3Store)
    store.part_bytes = PART
    assert works(store) and policy.hits == refused
    assert {one.method for one in proxy.seen if _creates(one)} == {"PUT", "POST"}
    assert not any(owner[0] in one.headers for one in proxy.seen if not _creates(one))
    proxy.add(_creates, times=None, status=403, code="AccessDenied")  # this server has no key to encrypt with
    monkeypatch.setenv("RAYPP_S3_ENCRYPTION", "aes256")
    proxy.seen.clear()
    with pytest.raises(AccessRefused):
        open_store(f"s3://{BUCKET}/policy").put("a", b"a")
    assert proxy.seen and not any(_lacks(one, *sse) for one in proxy.seen)


@pytest.mark.gate
def test_a_server_with_a_key_encrypts_what_is_written_and_gives_it_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def with_a_key(folder: Path) -> None:
        write_locks(folder)
        with (folder / "security.toml").open("a") as settings:
            settings.write(f'[s3.sse]\nkey = "{secrets.token_hex(32)}"\n')

    monkeypatch.setattr("raypp.control.clusters.seaweed.write_locks", with_a_key)
    plain = b"a canary of the plain text" * (2 * PART // 26)
    with seaweed(tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RAYPP_S3_ENCRYPTION", "AES256")
        store = open_store(f"s3://{BUCKET}/encrypted")
        assert isinstance(store, S3Store)
        store.part_bytes = PART
        store.put("small", plain[:999])
        store.put_stream("in-parts", [plain], len(plain))
        assert store.get("small") == plain[:999] and store.get("in-parts") == plain
        assert store.get("in-parts", PART - 5, PART + 5) == plain[PART - 5 : PART + 5]
        for key in ("small", "in-parts"):
            head = S3Clients().current.head_object(Bucket=BUCKET, Key=f"encrypted/{key}")
            assert head["ServerSideEncryption"] == "AES256"
        assert not any(plain[:26] in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def _lacks(request: Request, header: str, value: str) -> bool:
    return _creates(request) and request.headers.get(header) != value


def _creates(request: Request) -> bool:
    part, begins = "partNumber" in request.target, "?uploads" in request.target
    return (request.method == "PUT" and not part) or (request.method == "POST" and begins)


@pytest.mark.gate
@pytest.mark.parametrize("value", ["when_supported", "when_required"])
@pytest.mark.usefixtures("keys")
def test_botos_checksums_are_off_for_servers_that_are_not_aws_unless_they_are_asked_for(
    value: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    store = open_store(f"s3://{BUCKET}/sums")
    store.get("x") if store.head("x") else None
    assert not any("x-amz-checksum-mode" in request.headers for request in proxy.seen)
    proxy.seen.clear()
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", value)
    monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", value)
    assert works(open_store(f"s3://{BUCKET}/sums"))
    asked = any(request.headers.get("x-amz-checksum-mode") == "ENABLED" for request in proxy.seen)
    assert asked == (value == "when_supported")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RAYPP_S3_ADDRESSING_STYLE", "host", "not a way to address a bucket"),
        ("RAYPP_S3_REQUEST_PAYER", "me", "is none of its values"),
        ("RAYPP_S3_ENCRYPTION", "yes", "is none of its values"),
        ("RAYPP_STORE_PATIENCE_S", "long", "not a number of seconds"),
        ("RAYPP_STORE_TIMEOUT_S", "-1", "not a number of seconds"),
        ("AWS_PROFILE", "nobody", "AWS settings are invalid"),
        ("AWS_ENDPOINT_URL_S3", "nonsense", "AWS settings are invalid"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match=message):
        open_store("s3://bucket/x")


@pytest.mark.gate
@pytest.mark.parametrize(
    ("endpoint", "ignored", "style"),
    [
        ("https://s3.eu-central-1.amazonaws.com", "", None),
        ("http://127.0.0.1:9", "", "path"),
        ("http://127.0.0.1:9", "true", None),
        ("", "", None),
    ],
)
def test_what_counts_is_the_server_that_boto3_will_ask_not_the_variable(
    endpoint: str, ignored: str, style: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", ignored)
    config: Any = S3Clients(access_key="a", secret_key="s").current.meta.config
    assert (config.s3 or {}).get("addressing_style") == style
    assert config.request_checksum_calculation == ("when_required" if style else "when_supported")
