"""On AWS a large upload sends the CRC-32 that raypp has, and nothing reads its bytes once more."""

import base64
import io
import zlib
from typing import Any

import pytest

from raypp.errors import JobError
from raypp.storage import open_store
from raypp.storage.s3 import S3Store
from raypp.storage.s3_upload import PartBody
from raypp.storage.store import MemorySource

DATA = memoryview(bytes(range(256)) * (40 << 10))
PART_BYTES = 5 << 20
_CREATED = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
_COMPLETED = b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>"


def encoded(data: memoryview) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


class Recorder:
    """Answers requests instead of a server, and reads bodies as the HTTP client does."""

    def __init__(self, store: S3Store) -> None:
        self.requests: list[Any] = []
        self.bodies: list[bytes] = []
        store._clients.current.meta.events.register("before-send.s3", self._answer)

    def _answer(self, request: Any, **_: Any) -> Any:
        from botocore.awsrequest import AWSResponse

        self.requests.append(request)
        if request.method == "PUT":
            self.bodies.append(b"".join(iter(lambda: bytes(request.body.read(1 << 14)), b"")))
        body = b"" if request.method == "PUT" else _COMPLETED if "uploadId=" in request.url else _CREATED
        answer = AWSResponse(request.url, 200, {"ETag": '"e"'}, io.BytesIO(body))
        answer._content = body
        return answer


@pytest.mark.parametrize(("scheme", "signed"), [("https", False), ("http", True)])
def test_parts_carry_the_sum_in_a_header_and_are_sent_as_they_are(scheme: str, signed: bool) -> None:
    store = S3Store(
        "bucket", endpoint=f"{scheme}://s3.eu-central-1.amazonaws.com", access_key="a", secret_key="s",
        part_bytes=PART_BYTES,
    )  # fmt: skip
    recorder = Recorder(store)
    store.put_stream("x", MemorySource([DATA]), len(DATA))
    parts = [request for request in recorder.requests if request.method == "PUT"]
    spans = [(0, PART_BYTES), (PART_BYTES, len(DATA))]
    assert sorted(recorder.bodies) == sorted(bytes(DATA[start:end]) for start, end in spans)
    for part in parts:
        assert isinstance(part.body, PartBody)  # boto3 would wrap what it sums itself
        sent = {name.lower(): value for name, value in part.headers.items()}
        text = [value.decode() if isinstance(value, bytes) else value for value in sent.values()]
        start, end = spans["partNumber=2" in part.url]
        assert encoded(DATA[start:end]) in text
        assert ("UNSIGNED-PAYLOAD" in text) != signed
        assert not {"x-amz-trailer", "transfer-encoding"} & sent.keys()


def test_of_small_objects_boto3_makes_the_sum() -> None:
    store = S3Store("bucket", endpoint="https://s3.eu-central-1.amazonaws.com", access_key="a", secret_key="s")
    recorder = Recorder(store)
    store.put("x", b"small")
    (request,) = recorder.requests
    assert request.headers["x-amz-trailer"] in ("x-amz-checksum-crc32", b"x-amz-checksum-crc32")


def test_a_directory_bucket_is_refused_by_its_name() -> None:
    with pytest.raises(JobError, match="S3 Express"):
        open_store("s3://runs--use1-az4--x-s3/prefix")
