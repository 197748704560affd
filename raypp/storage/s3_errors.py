"""Classifies errors of boto3 and S3 servers, and translates them into messages with a fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from raypp.errors import Problem, RayppError, in_words
from raypp.proxies import FIX
from raypp.storage.store import AccessRefused, BucketMissing, NotFound, ServerNotThere, StoreError
from raypp.untrusted.text import visible

CONFLICT = 409
REFUSED_CONDITION = 412
_UNKNOWN_KEY = {"InvalidAccessKeyId", "InvalidClientTokenId"}
_WRONG_SECRET = {"SignatureDoesNotMatch"}
_EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "InvalidToken", "RequestExpired"}
_CLOCK = {"RequestTimeTooSkewed"}
_PASSING = {
    "SlowDown",
    "ServiceUnavailable",
    "RequestTimeout",
    "Throttling",
    "ThrottlingException",
    "RequestThrottled",
    "TooManyRequests",
    "InternalError",
    "OperationAborted",
    # The bytes were changed or cut off in transit.
    "BadDigest",
    "IncompleteBody",
    "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch",
}
_STAYING = {501, 505, 507}
_LONGEST_TEXT = 500
_PARSING = (ValueError, LookupError, OverflowError, RecursionError)
"""boto3 parses whatever comes: a size that is not a number is a ValueError."""
_MOVED = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}


class RefusedRequest(StoreError):
    """The server does not take this kind of request; the same request fails again."""


class _Place(Protocol):
    bucket: str

    @property
    def url(self) -> str: ...

    @property
    def endpoint(self) -> str | None: ...

    @property
    def proxy(self) -> str: ...


def status_of(error: BaseException) -> int:
    """Returns the HTTP status of an error response; 0 if the error is not one."""
    from botocore.exceptions import ClientError

    if not isinstance(error, ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: BaseException) -> str:
    """Returns the S3 error code of an error response; empty if the error is not one."""
    from botocore.exceptions import ClientError

    if not isinstance(error, ClientError):
        return ""
    return str(error.response.get("Error", {}).get("Code", ""))


def in_brief(text: object) -> str:
    """Returns text of a server, or of an error about it, on one line; cut off if it is long."""
    line = visible(str(text)[: 2 * _LONGEST_TEXT])
    return line if len(line) <= _LONGEST_TEXT else f"{line[: _LONGEST_TEXT - 1]}…"


def may_pass(error: BaseException) -> bool:
    """Returns whether a retry may succeed: no or incomplete response, damaged bytes, 5xx, 429.

    A failed request that changes something may have taken effect nevertheless.
    """
    from botocore.exceptions import ClientError, FlexibleChecksumError, HTTPClientError
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, ClientError):
        status = status_of(error)
        return code_of(error) in _PASSING or status == 429 or (status >= 500 and status not in _STAYING)
    return is_incomplete_response(error) or isinstance(
        error,
        (
            HTTPClientError,
            NoConnection,
            FlexibleChecksumError,
            ResponseParserError,
            HTTPError,  # while boto3 reads the text of an error
            ConnectionError,
            TimeoutError,
        ),
    )


def is_incomplete_response(error: BaseException) -> bool:
    """Returns whether the connection ended before the complete body arrived."""
    from botocore.exceptions import IncompleteReadError, ResponseStreamingError

    return isinstance(error, (IncompleteReadError, ResponseStreamingError))


def is_unreachable(error: BaseException) -> bool:
    """Returns whether nothing listens at the endpoint; the server may be restarting."""
    from botocore.exceptions import EndpointConnectionError, ProxyConnectionError

    return isinstance(error, (EndpointConnectionError, ProxyConnectionError))


def is_credentials_error(error: BaseException) -> bool:
    """Returns whether new credentials may help: these have expired, or were revoked or replaced."""
    code = code_of(error)
    # A response to HEAD has no body with a code: its 403 has only a number.
    return code in _UNKNOWN_KEY | _WRONG_SECRET | _EXPIRED or code == "403"


def translated(error: Exception, store: _Place, key: str, tried: str = "") -> Exception:
    """Translates an error into a `RayppError`; returns errors unrelated to the store unchanged.

    What may be a proxy's doing names the proxy first: anything but an answer with a code of S3.

    Args:
        error: The error that boto3 raised.
        store: The store.
        key: The object's key; empty if the request was about no object.
        tried: Number and duration of tries, as text, for temporary failures.
    """
    found = _translated(error, store, key, tried)
    code = code_of(error)
    if not store.proxy or not isinstance(found, StoreError) or (code and not code.isdigit()):
        return found
    (problem,) = found.problems
    fix = f"{FIX}, or check the proxy; otherwise {problem.fix}" if problem.fix else FIX
    return type(found)(replace(problem, what=f"through {store.proxy}: {problem.what}", fix=fix))


def _translated(error: Exception, store: _Place, key: str, tried: str) -> Exception:
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        CredentialRetrievalError,
        FlexibleChecksumError,
        NoCredentialsError,
        PartialCredentialsError,
    )
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, RayppError):
        return error
    place = f"{store.url}/{key}" if key else store.url
    after = f", {tried}" if tried else ""
    if isinstance(error, ClientError):
        return _refusal(error, store, place, after)
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return AccessRefused(
            Problem(
                store.url,
                "no credentials for S3 were found",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; the embedded cluster's store "
                "needs none of them while it runs (`raypp local up`)",
            )
        )
    if isinstance(error, CredentialRetrievalError):
        return AccessRefused(
            Problem(
                store.url, f"cannot get new credentials: {in_brief(error)}", "check the profile that AWS_PROFILE names"
            )
        )
    if isinstance(error, (FlexibleChecksumError, ResponseParserError)):
        return StoreError(
            Problem(
                place,
                f"the response is damaged: {in_brief(error)}{after}",
                "set AWS_RESPONSE_CHECKSUM_VALIDATION=when_required if the server computes checksums differently",
            )
        )
    if is_incomplete_response(error):
        return StoreError(
            Problem(place, f"was cut off in transit: {in_brief(error)}{after}", "check the server and the network")
        )
    if isinstance(error, (BotoCoreError, HTTPError, OSError)):
        where = store.endpoint or "AWS (AWS_ENDPOINT_URL_S3 is not set)"
        return ServerNotThere(
            Problem(
                place,
                f"no answer from the S3 server at {where}: {in_brief(error)}{after}",
                "check that it runs, that this machine can reach it, and that AWS_ENDPOINT_URL_S3 is its address",
            )
        )
    if isinstance(error, _PARSING):
        return StoreError(
            Problem(
                place,
                f"the server's answer cannot be parsed: {in_brief(in_words(error))}",
                "check the server, and every proxy before it",
            )
        )
    return error


def _refusal(error: Exception, store: _Place, place: str, after: str) -> RayppError:
    status, code = status_of(error), code_of(error)
    answer = getattr(error, "response", {})
    code, message = in_brief(code), in_brief(answer.get("Error", {}).get("Message", ""))
    at = f" at {store.endpoint}" if store.endpoint else ""
    if code == "NoSuchBucket":
        return BucketMissing(
            Problem(
                "checkpoint.url",
                f"the bucket {store.bucket!r} does not exist{at}",
                "create it, or correct the name; raypp creates no buckets",
            )
        )
    if code in ("NoSuchKey", "NotFound", "404") or status == 404:
        return NotFound(Problem(place, "there is no such object"))
    what, fix = _about_the_caller(code, at, answer)
    if what:
        return AccessRefused(Problem(place, what, fix))
    if status in (401, 403):
        return AccessRefused(
            Problem(
                place,
                f"access denied{at} ({code or status}{': ' + message if message else ''})",
                f"allow the key to list, read, write and delete in the bucket {store.bucket!r}",
            )
        )
    if status == 301 or code in _MOVED:
        return StoreError(
            Problem(place, f"the bucket is in another region: {message}", "set AWS_REGION to the bucket's region")
        )
    what = f"the server{at} answered {status} {code}: {message}{after}"
    if status == 429 or (status >= 500 and status not in _STAYING):
        return StoreError(Problem(place, what, "try again later; check the server if it persists"))
    if may_pass(error):
        return StoreError(Problem(place, what, "check the network, and every proxy before the server"))
    fix = "check that the server implements S3, and that no proxy changes requests; `raypp doctor --store` tries all"
    return RefusedRequest(Problem(place, what, fix))


def _about_the_caller(code: str, at: str, answer: dict[str, object]) -> tuple[str, str]:
    """Returns what is wrong with the caller's credentials, and a fix; empty for other errors."""
    if code in _UNKNOWN_KEY:
        return f"the server{at} does not know the access key", "check AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL_S3"
    if code in _WRONG_SECRET:
        return f"the server{at} rejects the signature: the secret key is wrong", "check AWS_SECRET_ACCESS_KEY"
    if code in _EXPIRED:
        return "the credentials have expired", "get new ones, and set AWS_SESSION_TOKEN"
    if code in _CLOCK:
        metadata = answer.get("ResponseMetadata")
        headers = metadata.get("HTTPHeaders", {}) if isinstance(metadata, dict) else {}
        return (
            f"the clock of this machine and that of the server{at} are too far apart"
            + (f" (the server says {in_brief(headers['date'])})" if "date" in headers else ""),
            "set this machine's clock (chrony, ntp); S3 allows 15 minutes",
        )
    return "", ""
