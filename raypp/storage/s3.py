"""An S3 bucket as a store, on AWS or on any server that speaks S3 and honours If-None-Match.

Settings come from the usual places: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION,
AWS_PROFILE, AWS_ENDPOINT_URL_S3, AWS_CA_BUNDLE, the instance's role.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from raypp.errors import JobError, Problem
from raypp.storage.s3_errors import CONFLICT, is_ambiguous, status_of, translated
from raypp.storage.store import (
    AlreadyExists,
    BucketMissing,
    Data,
    NotFound,
    ObjectInfo,
    StoreError,
    check_key,
    check_prefix,
    probe_by_writing,
)

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PART_BYTES = 16 << 20
"""Objects up to this size travel in one request, larger ones in parts of this size."""
PARTS_IN_FLIGHT = 4
"""Parts of one object uploaded at once; a stream holds at most this many (and one) in memory."""
_MOST_PARTS = 9000
_TRIES = 5
_URL = re.compile(r"^s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>.*))?$", re.IGNORECASE)
T = TypeVar("T")


def open_s3(url: str, *, missing_bucket: str = "error") -> S3Store:
    """The store of `s3://bucket/prefix`."""
    match = _URL.match(url)
    if match is None:
        raise JobError(
            Problem(
                "checkpoint.url",
                f"{url!r} is not of the form s3://bucket/prefix",
                "a bucket's name has 3 to 63 of a-z 0-9 . -",
            )
        )
    prefix = (match["prefix"] or "").strip("/")
    if prefix:
        check_key(prefix)
    store = S3Store(match["bucket"], prefix)
    if missing_bucket == "create":
        store.create_bucket()
    return store


class S3Store:
    """Objects below a prefix of a bucket.

    Args:
        bucket: Its name.
        prefix: Put before every key, without slashes at its ends; may be empty.
        endpoint: The server's URL; None: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or AWS itself.
        access_key: Together with `secret_key`; None: boto3's usual places.
        secret_key: See `access_key`.
        part_bytes: Size of the parts of large objects (S3 allows no less than 5 MiB).
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
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.part_bytes = part_bytes
        self.endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
        keys = {"aws_access_key_id": access_key, "aws_secret_access_key": secret_key} if access_key else {}
        self._client = _client(self.endpoint, keys, tries=_TRIES)
        # A conditional write may not be repeated behind our back: the repetition would meet our own object.
        self._single_try = _client(self.endpoint, keys, tries=1)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> None:
        name, body = self._name(key), bytes(data)
        if if_absent:
            self._put_if_absent(key, name, body)
        else:
            self._ask(key, lambda: self._client.put_object(Bucket=self.bucket, Key=name, Body=body))

    def put_stream(self, key: str, chunks: Iterable[Data], size: int) -> None:
        if size <= self.part_bytes:
            self.put(key, _joined(key, chunks, size))
            return
        name = self._name(key)
        started = self._ask(key, lambda: self._client.create_multipart_upload(Bucket=self.bucket, Key=name))
        upload = started["UploadId"]
        try:
            done = self._upload_parts(key, name, upload, chunks, size)
            self._ask(
                key,
                lambda: self._client.complete_multipart_upload(
                    Bucket=self.bucket, Key=name, UploadId=upload, MultipartUpload={"Parts": done}
                ),
            )
        except BaseException:
            self._abort(name, upload)
            raise

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        first = start or 0
        if end is not None and end <= first:
            return b""
        wanted: dict[str, Any] = {}
        if start is not None or end is not None:
            wanted["Range"] = f"bytes={first}-{'' if end is None else end - 1}"
        name = self._name(key)

        def read() -> bytes:
            return self._client.get_object(Bucket=self.bucket, Key=name, **wanted)["Body"].read()

        # boto3 repeats requests, but not the reading of a body that breaks off.
        for left in reversed(range(3)):
            try:
                return read()
            except Exception as error:
                if status_of(error) == 416:
                    return b""
                if is_ambiguous(error) and left:
                    time.sleep(0.2)
                    continue
                raise translated(error, self, key) from error
        raise AssertionError("unreachable")

    def head(self, key: str) -> ObjectInfo | None:
        name = self._name(key)
        try:
            found = self._ask(key, lambda: self._client.head_object(Bucket=self.bucket, Key=name))
        except NotFound:
            return None
        return ObjectInfo(key, found["ContentLength"], found["LastModified"].timestamp())

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        below = f"{self.prefix}/" if self.prefix else ""
        more: dict[str, Any] = {}
        while True:
            page = self._ask(
                prefix,
                partial(self._client.list_objects_v2, Bucket=self.bucket, Prefix=below + check_prefix(prefix), **more),
            )
            for entry in page.get("Contents", []):
                # Some servers list folders as empty objects.
                if not entry["Key"].endswith("/"):
                    yield ObjectInfo(entry["Key"][len(below) :], entry["Size"], entry["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, keys: Iterable[str]) -> None:
        names = [self._name(key) for key in keys]
        for first in range(0, len(names), 1000):
            batch: Any = [{"Key": name} for name in names[first : first + 1000]]
            answer = self._ask(
                batch[0]["Key"],
                partial(self._client.delete_objects, Bucket=self.bucket, Delete={"Objects": batch, "Quiet": True}),
            )
            for refused in answer.get("Errors", []):
                if refused.get("Code") not in ("NoSuchKey", "404"):
                    raise StoreError(
                        Problem(
                            f"s3://{self.bucket}/{refused.get('Key')}", f"was not deleted: {refused.get('Message')}"
                        )
                    )

    def probe(self) -> None:
        # Listing is asked first because its refusals say why; those of HEAD have no body.
        self._ask("", lambda: self._client.list_objects_v2(Bucket=self.bucket, MaxKeys=1))
        probe_by_writing(self)

    def create_bucket(self) -> None:
        """Makes the bucket when it is not there. Only for callers that were told to."""
        try:
            self._ask("", lambda: self._client.list_objects_v2(Bucket=self.bucket, MaxKeys=1))
        except BucketMissing:
            region = self._client.meta.region_name
            where: Any = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
            try:
                self._client.create_bucket(Bucket=self.bucket, **where)
            except Exception as error:
                if status_of(error) != 409:
                    raise translated(error, self, "") from error

    def _name(self, key: str) -> str:
        check_key(key)
        return f"{self.prefix}/{key}" if self.prefix else key

    def _ask(self, key: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except Exception as error:
            raise translated(error, self, key) from error

    def _put_if_absent(self, key: str, name: str, body: bytes) -> None:
        """If-None-Match: *, repeated by hand: after a lost answer, "exists" may mean our own object."""
        in_doubt = False
        for attempt in range(_TRIES):
            try:
                self._single_try.put_object(Bucket=self.bucket, Key=name, Body=body, IfNoneMatch="*")
                return
            except Exception as error:
                status = status_of(error)
                if status == 412:
                    if in_doubt and self.get(key) == body:
                        return
                    raise AlreadyExists(Problem(f"{self.url}/{key}", "is already there")) from None
                # 409: another conditional write of the key is under way (AWS); it decides, we ask again.
                retry = status == CONFLICT or is_ambiguous(error)
                if not retry or attempt == _TRIES - 1:
                    raise translated(error, self, key) from error
                in_doubt = in_doubt or status != CONFLICT
                time.sleep(0.2 * 2**attempt)

    def _upload_parts(self, key: str, name: str, upload: str, chunks: Iterable[Data], size: int) -> Any:
        """Uploads the parts as the chunks come; returns what completes the upload."""
        part_bytes = max(self.part_bytes, -(-size // _MOST_PARTS))
        futures: list[Future[str]] = []

        def send(number: int, body: bytes) -> str:
            answer = self._client.upload_part(
                Bucket=self.bucket, Key=name, UploadId=upload, PartNumber=number, Body=body
            )
            return answer["ETag"]

        with ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="raypp-upload") as pool:
            try:
                for number, part in enumerate(_parts(key, chunks, size, part_bytes), start=1):
                    running = [future for future in futures if not future.done()]
                    if len(running) >= PARTS_IN_FLIGHT:
                        wait(running, return_when="FIRST_COMPLETED")
                    for future in futures:
                        if future.done():
                            self._ask(key, future.result)
                    futures.append(pool.submit(send, number, part))
                return [
                    {"PartNumber": number, "ETag": self._ask(key, future.result)}
                    for number, future in enumerate(futures, start=1)
                ]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def _abort(self, name: str, upload: str) -> None:
        try:
            self._single_try.abort_multipart_upload(Bucket=self.bucket, Key=name, UploadId=upload)
        except Exception:  # noqa: BLE001 - the failure that led here is the one to tell; parts expire
            return


def _client(endpoint: str | None, keys: dict[str, Any], tries: int) -> S3Client:
    # boto3 takes 0.3 s to import: only those who use S3 pay.
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    config = Config(
        connect_timeout=5,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": tries},
        max_pool_connections=4 * PARTS_IN_FLIGHT,
        # Many servers answer boto3's newer checksum headers with errors or damaged bodies.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if endpoint else "auto"},
    )
    try:
        session = boto3.session.Session()
        region = session.region_name or "us-east-1"
        client: S3Client = session.client("s3", endpoint_url=endpoint, region_name=region, config=config, **keys)
        return client
    except (BotoCoreError, ValueError) as error:
        raise JobError(
            Problem(
                "", f"the AWS settings cannot be used: {error}", "check AWS_ENDPOINT_URL_S3, AWS_PROFILE and AWS_REGION"
            )
        ) from error


def _parts(key: str, chunks: Iterable[Data], size: int, part_bytes: int) -> Iterator[bytes]:
    """The chunks, cut and joined into parts of `part_bytes` (the last one shorter)."""
    part = bytearray()
    seen = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        seen += len(view)
        while len(view):
            taken = view[: part_bytes - len(part)]
            part += taken
            view = view[len(taken) :]
            if len(part) == part_bytes:
                yield bytes(part)
                part = bytearray()
    if seen != size:
        raise ValueError(f"{key}: the chunks hold {seen} bytes, {size} were announced")
    if part:
        yield bytes(part)


def _joined(key: str, chunks: Iterable[Data], size: int) -> bytes:
    data = b"".join(chunks)
    if len(data) != size:
        raise ValueError(f"{key}: the chunks hold {len(data)} bytes, {size} were announced")
    return data
