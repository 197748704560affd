"""An S3 bucket as a store, on AWS or any compatible server.

Objects are created exactly once by If-None-Match; by bids if a probe shows that it is ignored.

Settings come from the usual sources (docs/storage.md lists them): AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL_S3, AWS_CA_BUNDLE, the instance's
role.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from raypp.errors import JobError, Problem, in_words
from raypp.kinds import StoreKind
from raypp.storage.s3_client import (
    CONFLICT,
    CONNECTIONS,
    REFUSED_CONDITION,
    RefusedRequest,
    S3Clients,
    code_of,
    in_brief,
    is_credentials_error,
    is_unreachable,
    may_pass,
    status_of,
    translated,
)
from raypp.storage.s3_listing import lacks_times, object_bytes, object_info, objects, uploads
from raypp.storage.s3_upload import PART_BYTES, PartBody, UploadSums, cut_into_parts, upload_in_parts
from raypp.storage.store import (
    AccessRefused,
    AlreadyExists,
    BucketMissing,
    Data,
    MemorySource,
    NotFound,
    ObjectInfo,
    Patience,
    StoreError,
    Unfinished,
    check_key,
    check_prefix,
    patience_from_environment,
    probe_by_writing,
)

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

log = logging.getLogger(__name__)

KIND = StoreKind(
    "s3",
    "s3://bucket/prefix, on AWS or any server with S3's interface",
    position=2,
    form="s3://bucket/prefix",
    holds_data=True,
    record_every_s=2.0,
    endpoints=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    secrets=("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    own_secrets="raypp.storage.s3_client:keys_of_profile",
    settings=(
        "AWS_ENDPOINT_URL_S3",
        "AWS_ENDPOINT_URL",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_REQUEST_CHECKSUM_CALCULATION",
        "AWS_RESPONSE_CHECKSUM_VALIDATION",
        "RAYPP_S3_ADDRESSING_STYLE",
        "RAYPP_S3_REQUEST_PAYER",
        "RAYPP_S3_ENCRYPTION",
        "RAYPP_S3_KMS_KEY",
        "RAYPP_S3_ACL",
        "RAYPP_S3_BUCKET_OWNER",
    ),
    own_settings="raypp.storage.s3_client:settings_of_profile",
    files=("AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CA_BUNDLE"),
    chosen_by=(
        "AWS_ENDPOINT_URL_S3",
        "AWS_ENDPOINT_URL",
        "AWS_ACCESS_KEY_ID",
        "AWS_PROFILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    ),
    embedded=True,
)

_URL = re.compile(r"^s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>.*))?$", re.IGNORECASE)
_INCOMPLETE_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Waits before a page is asked for again, of which some objects are not whole."""
_MOST_RENEWALS = 5
_CONDITION_UNKNOWN = {"NotImplemented", "InvalidArgument", "InvalidRequest", "UnsupportedHeader"}
BIDS = ".raypp-bids"
"""The folder of bids under the store's prefix; hidden from callers."""
DEAD_BID_S = 120.0
"""A process that has observed a bid for this long, on its own clock, takes its writer for dead."""
_FRESH_S = DEAD_BID_S / 4
T = TypeVar("T")


class ConditionNotSupported(StoreError):
    """The server rejected a conditional write as unsupported."""


def open_url(url: str, *, missing_bucket: str = "error", patience: Patience | None = None) -> S3Store:
    match = _URL.match(url)
    if match is None:
        fault = f"{url!r} is not of the form s3://bucket/prefix"
        raise JobError(Problem("checkpoint.url", fault, "use a bucket name of 3 to 63 characters from a-z 0-9 . -"))
    if match["bucket"].endswith("--x-s3"):
        fault = f"{url} is a directory bucket (S3 Express): it cannot be listed by any prefix, as raypp does"
        raise JobError(Problem("checkpoint.url", fault, "use a general purpose bucket"))
    prefix = (match["prefix"] or "").strip("/")
    if prefix:
        check_key(prefix)
    store = S3Store(match["bucket"], prefix, patience=patience)
    if missing_bucket == "create":
        store.create_bucket()
    return store


class S3Store:
    """Stores objects under a prefix of a bucket.

    Args:
        prefix: Prefix of every key, without slashes at its ends; may be empty.
        endpoint: The server's URL; None for AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the profile, or
            AWS.
        access_key: Together with `secret_key`; None for boto3's usual sources.
        part_bytes: Size of the parts of large objects (S3 requires at least 5 MiB).
        patience: How long temporary failures are retried; None for the environment's setting.
        timeout_s: Longest silence on a connection; None for the environment's setting.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        part_bytes: int = PART_BYTES,
        patience: Patience | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.part_bytes = part_bytes
        self.patience = patience or patience_from_environment()
        self.trouble = ""
        """Why the last request is tried again; empty if it is not."""
        self._clients = S3Clients(endpoint, access_key, secret_key, timeout_s, self.patience.silence_s)
        self.sums = UploadSums(self)
        self._deletes_singly = False
        self._honours_condition: bool | None = None
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"

    @property
    def endpoint(self) -> str | None:
        """The server's URL; None for AWS itself."""
        return self._clients.endpoint

    @property
    def proxy(self) -> str:
        """The proxy that requests go through, in words; empty: none."""
        return self._clients.proxy

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> None:
        name, body = self.name_of(key), bytes(data)
        if if_absent:
            create = self.put_if_none_match if self._condition_is_honoured() else partial(create_by_bids, self)
            create(key, body)
        else:
            self.send(key, "put_object", Key=name, Body=body, **self.sums.of(body))

    def put_stream(self, key: str, chunks: Iterable[Data], size: int) -> None:
        if size <= self.part_bytes and isinstance(chunks, MemorySource):
            name, body = self.name_of(key), PartBody(chunks, 0, chunks.size)
            self.send(key, "put_object", Key=name, Body=body, **self.sums.of(body))
        elif size <= self.part_bytes:
            self.put(key, b"".join(cut_into_parts(key, chunks, size, self.part_bytes)))
        else:
            upload_in_parts(self, key, self.name_of(key), chunks, size)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        first = start or 0
        if end is not None and end <= first:
            return b""
        wanted: dict[str, Any] = {}
        if start is not None or end is not None:
            wanted["Range"] = f"bytes={first}-{'' if end is None else end - 1}"
        name = self.name_of(key)

        def read(client: S3Client) -> bytes:
            try:
                answer = client.get_object(Bucket=self.bucket, Key=name, **wanted)
            except Exception as error:
                if wanted and status_of(error) == 416:
                    return b""
                raise
            return object_bytes(answer, first, end, bool(wanted), f"{self.url}/{key}")

        return self.ask(key, read)

    def head(self, key: str) -> ObjectInfo | None:
        try:
            answer = self.send(key, "head_object", Key=self.name_of(key))
        except NotFound:
            return None
        return object_info(key, answer.get("ContentLength"), answer.get("LastModified"), f"{self.url}/{key}")

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for info in self.list_all(prefix):
            if not info.key.startswith(f"{BIDS}/"):
                yield info

    def list_all(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Lists like `list`, including raypp's own bids."""
        full = self._below + check_prefix(prefix)
        ask = self._page_of("list_objects_v2", prefix, full)
        return objects(ask, self._below, full, self.url)

    def _page_of(self, operation: str, prefix: str, full: str) -> Callable[[dict[str, Any]], Any]:
        def ask(more: dict[str, Any]) -> Any:
            for wait_s in (*_INCOMPLETE_S, 0.0):
                answer = self.send(prefix, operation, Prefix=full, **more)
                if wait_s == 0.0 or not lacks_times(answer):
                    return answer
                time.sleep(wait_s)
            raise AssertionError("the last answer is returned")

        return ask

    def delete(self, keys: Iterable[str]) -> None:
        names = [self.name_of(key) for key in keys]
        for first in range(0, len(names), 1000):
            batch = names[first : first + 1000]
            if not self._deletes_singly:
                try:
                    self._delete_together(batch)
                    continue
                except (RefusedRequest, AccessRefused, NotFound) as refused:
                    # Some servers want Content-MD5 with it, which boto3 no longer sends.
                    self._delete_singly(batch)
                    self._deletes_singly = True
                    log.info("%s; raypp deletes each object with a request of its own", refused)
            else:
                self._delete_singly(batch)

    def _delete_together(self, names: Sequence[str]) -> None:
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        answer = self.send(names[0][len(self._below) :], "delete_objects", Delete=wanted)
        for refused in answer.get("Errors", []):
            if refused.get("Code") not in ("NoSuchKey", "404"):
                fault = f"was not deleted: {in_brief(refused.get('Code'))} {in_brief(refused.get('Message'))}"
                raise StoreError(Problem(f"s3://{self.bucket}/{in_brief(refused.get('Key'))}", fault))

    def _delete_singly(self, names: Sequence[str]) -> None:
        def delete(name: str) -> None:
            with suppress(NotFound):  # S3 answers 204, some servers 404
                self.send(name[len(self._below) :], "delete_object", Key=name)

        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="raypp-delete") as pool:
            for _ in pool.map(delete, names):  # an error cancels those that have not begun
                pass

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        full = self._below + check_prefix(prefix)
        ask = self._page_of("list_multipart_uploads", prefix, full)
        return uploads(ask, self._below, full, self.url)

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        for one in unfinished:
            with suppress(NotFound):
                self.send(one.key, "abort_multipart_upload", Key=self.name_of(one.key), UploadId=one.id)

    def limitations(self) -> tuple[Problem, ...]:
        honoured = self._condition_is_honoured()  # its probe deletes, too
        problems = () if honoured else (limitation(self.url),)
        return (*problems, _singly(self.url)) if self._deletes_singly else problems

    def probe(self) -> None:
        # List first: an error response to it contains the reason, one to HEAD has no body.
        self.send("", "list_objects_v2", MaxKeys=1)
        probe_by_writing(self)

    def create_bucket(self) -> None:
        """Creates the bucket if it does not exist. Only for callers that were asked to."""
        try:
            self.send("", "list_objects_v2", MaxKeys=1)
        except BucketMissing:
            region = self._clients.current.meta.region_name
            where: Any = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}

            def create(client: S3Client) -> None:
                try:
                    client.create_bucket(Bucket=self.bucket, **where)
                except Exception as error:
                    if status_of(error) != CONFLICT:
                        raise

            self.ask("", create)

    def _condition_is_honoured(self) -> bool:
        """Returns whether the server honours If-None-Match: probed once, then remembered."""
        with self._lock:
            if self._honours_condition is None:
                self._honours_condition = probe_condition(self)
                if not self._honours_condition:
                    log.warning("%s", limitation(self.url))
            return self._honours_condition

    def put_if_none_match(self, key: str, data: Data) -> None:
        """Writes an object with If-None-Match: *. If a response was lost, "exists" may refer to
        this call's own object: then it is read and compared. Raises AlreadyExists: another writer's
        object exists; ConditionNotSupported: the server rejected the header."""
        name, body = self.name_of(key), bytes(data)
        sums = self.sums.of(body)
        in_doubt = False

        def write(client: S3Client) -> None:
            nonlocal in_doubt
            try:
                client.put_object(Bucket=self.bucket, Key=name, Body=body, IfNoneMatch="*", **sums)
            except Exception as error:
                status = status_of(error)
                if status == REFUSED_CONDITION:
                    if in_doubt and self.get(key) == body:
                        return
                    raise AlreadyExists(Problem(f"{self.url}/{key}", "already exists")) from None
                if status == 501 or (status == 400 and code_of(error) in _CONDITION_UNKNOWN):
                    fault = f"the server rejected If-None-Match: {error}"
                    raise ConditionNotSupported(Problem(self.url, fault)) from None
                in_doubt = in_doubt or status != CONFLICT
                raise

        # 409: another conditional write of the key is under way (AWS). It decides; retry then.
        self.ask(key, write, also=lambda error: status_of(error) == CONFLICT)

    def send(self, key: str, operation: str, **request: Any) -> Any:
        """Sends one of boto3's requests about this bucket; see `ask`."""
        return self.ask(key, lambda client: getattr(client, operation)(Bucket=self.bucket, **request))

    def ask(
        self, key: str, request: Callable[[S3Client], T], also: Callable[[BaseException], bool] = lambda _: False
    ) -> T:
        """Sends a request until it succeeds, fails for good, or the time is up. Renews rejected
        credentials. `also`: classifies further failures as temporary."""
        pauses, begun, tries, renewals = self.patience.pauses(), time.monotonic(), 0, 0
        try:
            while True:
                client = self._clients.current
                tries += 1
                try:
                    return request(client)
                except Exception as error:
                    if is_credentials_error(error) and renewals < _MOST_RENEWALS and self._clients.renew(client):
                        renewals += 1
                        continue
                    spent = time.monotonic() - begun
                    gone = is_unreachable(error) and spent > self.patience.unreachable_s
                    pause = next(pauses, None) if (may_pass(error) or also(error)) and not gone else None
                    if pause is None:
                        tried = f"tried {tries} times in {spent:.0f} s" if tries > 1 else ""
                        raise translated(error, self, key, tried) from error
                    self.trouble = f"the store does not answer: {in_words(translated(error, self, key))}"
                    time.sleep(pause)
        finally:
            self.trouble = ""

    def send_once(self, operation: str, **request: Any) -> None:
        """Sends a request like `send`, but once, whatever follows: to clean up after a failure."""
        with suppress(Exception):
            getattr(self._clients.current, operation)(Bucket=self.bucket, **request)

    @property
    def _below(self) -> str:
        return f"{self.prefix}/" if self.prefix else ""

    def name_of(self, key: str) -> str:
        """Returns an object's name in the bucket."""
        return self._below + check_key(key)


def limitation(url: str) -> Problem:
    """Describes the limitation of a server without conditional writes."""
    return Problem(
        url,
        "this server ignores If-None-Match, so raypp creates claims and commits by bids: marker objects, a list "
        f"that shows who else bids, and a read-back. That is slower, and safe unless a writer stalls for more "
        f"than {_FRESH_S:.0f} s in between",
        "use a store that supports it: AWS S3, SeaweedFS, Ceph, MinIO, or a directory",
    )


def probe_condition(store: S3Store) -> bool:
    """Returns whether a conditional write over a small temporary object is refused."""
    key = f".raypp-probe-{secrets.token_hex(8)}"
    store.put(key, b"first")
    try:
        store.put_if_none_match(key, b"second")
    except AlreadyExists:
        return True
    except ConditionNotSupported:
        return False
    finally:
        store.delete([key])
    return False


def create_by_bids(store: S3Store, key: str, data: Data, dead_bid_s: float = DEAD_BID_S) -> None:
    """Creates an object with plain writes, lists and reads only.

    Every writer that wants the key first writes its own bid, then lists the bids. Of any two
    writers, the one that lists later sees the other's bid. Only a writer that sees no other bid may
    write, and it removes its bid afterwards. So no two write at the same time, and the next one
    finds the object. If several meet, the lowest bid stays and the others are withdrawn. A dead
    writer's bid blocks the key until another writer has observed it for `dead_bid_s` on its own
    clock; clocks of different hosts are never compared.

    Raises:
        AlreadyExists: The object exists.
        StoreError: The write failed, or dead bids blocked it for too long.
    """
    folder = f"{BIDS}/{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    bid = f"{folder}/{secrets.token_hex(12)}"
    exists = AlreadyExists(Problem(f"{store.url}/{key}", "already exists"))
    seen: dict[str, float] = {}
    placed = False
    body = bytes(data)
    end = time.monotonic() + 5 * dead_bid_s
    try:
        while time.monotonic() < end:
            if store.head(key) is not None:
                raise exists
            if not placed:
                store.put(bid, key.encode())
                placed = True
            began = time.monotonic()
            others = {info.key for info in store.list_all(f"{folder}/")} - {bid}
            if not others:
                if store.head(key) is not None:
                    raise exists
                if time.monotonic() - began > dead_bid_s / 4:
                    continue  # this writer stalled: others may have taken it for dead
                store.put(key, body)
                if store.get(key) != body:
                    raise exists
                return
            now = time.monotonic()
            seen = {other: seen.get(other, now) for other in others}
            dead = [other for other, since in seen.items() if now - since > dead_bid_s]
            if dead:
                store.delete(dead)
            elif min(others) < bid:
                store.delete([bid])
                placed = False
            time.sleep(random.uniform(0.02, 0.1) if len(seen) < 16 else random.uniform(0.1, 1.0))
    finally:
        if placed:
            store.delete([bid])
    fault = f"other writers have been bidding for it for {5 * dead_bid_s:.0f} s"
    fix = f"if no run uses it, delete what is below {store.url}/{folder}"
    raise StoreError(Problem(f"{store.url}/{key}", fault, fix))


def _singly(url: str) -> Problem:
    """Describes the limitation of a server that refuses DeleteObjects."""
    return Problem(
        url,
        "this server refuses to delete several objects with one request (DeleteObjects), so raypp sends a request "
        "for each; removing old checkpoints takes longer",
        "nothing needs to be done",
    )
