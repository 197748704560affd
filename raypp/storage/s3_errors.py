"""What went wrong between boto3 and a server, in words a person can act on."""

from __future__ import annotations

from typing import Protocol

from raypp.errors import Problem, RayppError
from raypp.storage.store import AccessRefused, BucketMissing, NotFound, ServerNotThere, StoreError

CONFLICT = 409
_UNKNOWN_KEY = {"InvalidAccessKeyId", "InvalidClientTokenId"}
_WRONG_SECRET = {"SignatureDoesNotMatch"}
_EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "InvalidToken"}


class _Place(Protocol):
    bucket: str
    endpoint: str | None

    @property
    def url(self) -> str: ...


def status_of(error: BaseException) -> int:
    """The HTTP status of a server's refusal; 0 when the error is not one."""
    from botocore.exceptions import ClientError

    if not isinstance(error, ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_ambiguous(error: BaseException) -> bool:
    """Whether the request may or may not have been carried out: no answer, half an answer, or 5xx."""
    from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError, ResponseStreamingError

    if isinstance(error, ClientError):
        return status_of(error) >= 500 or error.response["Error"].get("Code") in (
            "SlowDown",
            "RequestTimeout",
            "Throttling",
        )
    return isinstance(
        error, (HTTPClientError, IncompleteReadError, ResponseStreamingError, ConnectionError, TimeoutError)
    )


def translated(error: Exception, store: _Place, key: str) -> Exception:
    """The error as a `RayppError`; errors that are not about the store come back as they are."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

    if isinstance(error, RayppError):
        return error
    if isinstance(error, ClientError):
        return _refusal(error, store, key)
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return AccessRefused(
            Problem(
                store.url,
                "no credentials for S3 were found",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
            )
        )
    if isinstance(error, (BotoCoreError, OSError)):
        where = store.endpoint or "AWS (AWS_ENDPOINT_URL_S3 is not set)"
        return ServerNotThere(
            Problem(
                store.url,
                f"no answer from the S3 server at {where}: {error}",
                "is it running, and reachable from this machine? AWS_ENDPOINT_URL_S3 says where it is",
            )
        )
    return error


def _refusal(error: Exception, store: _Place, key: str) -> RayppError:
    status = status_of(error)
    answer = getattr(error, "response", {}).get("Error", {})
    code, message = str(answer.get("Code", "")), str(answer.get("Message", ""))
    at = f" at {store.endpoint}" if store.endpoint else ""
    place = f"{store.url}/{key}" if key else store.url
    if code == "NoSuchBucket":
        return BucketMissing(
            Problem(
                "checkpoint.url",
                f"the bucket {store.bucket!r} does not exist{at}",
                "create it, or correct the name; raypp makes no buckets",
            )
        )
    if code in ("NoSuchKey", "NotFound", "404") or status == 404:
        return NotFound(Problem(place, "there is no such object"))
    if code in _UNKNOWN_KEY:
        return AccessRefused(
            Problem(
                place, f"the server{at} does not know the access key", "check AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL_S3"
            )
        )
    if code in _WRONG_SECRET:
        return AccessRefused(
            Problem(
                place, f"the server{at} refuses the signature: the secret key is wrong", "check AWS_SECRET_ACCESS_KEY"
            )
        )
    if code in _EXPIRED:
        return AccessRefused(Problem(place, "the credentials have expired", "get new ones, and set AWS_SESSION_TOKEN"))
    if status in (401, 403):
        return AccessRefused(
            Problem(
                place,
                f"access denied{at} ({code or status}{': ' + message if message else ''})",
                f"give the key the right to list, read, write and delete in the bucket {store.bucket!r}",
            )
        )
    if status == 301 or code in (
        "PermanentRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
    ):
        return StoreError(
            Problem(place, f"the bucket is in another region: {message}", "set AWS_REGION to the bucket's region")
        )
    return StoreError(
        Problem(
            place,
            f"the server{at} answered {status} {code}: {message}",
            "this may pass; look at the server if it stays",
        )
    )
