"""Creates boto3 clients from the usual settings for AWS and compatible servers, and translates
their errors into messages with a fix.

An S3 store has one `S3Clients`, renewed when credentials expire. docs/storage.md lists settings.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from raypp.errors import JobError, Problem, RayppError, in_words
from raypp.proxies import FIX, is_loopback, proxy_for
from raypp.storage.s3_upload import prepare_client
from raypp.storage.store import (
    SILENCE_S,
    AccessRefused,
    BucketMissing,
    NotFound,
    ServerNotThere,
    StoreError,
    seconds_from_environment,
)
from raypp.untrusted.text import visible

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from raypp.storage.s3 import S3Store

log = logging.getLogger(__name__)

CONNECTIONS = 16
"""Number of concurrent requests of one client."""
CONNECT_S = 5.0
"""Longest time until a server accepts a connection."""
_STYLES = ("path", "virtual", "auto")
_ADDED: dict[str, tuple[str, tuple[str, ...]]] = {
    "RAYPP_S3_REQUEST_PAYER": ("RequestPayer", ("requester",)),
    "RAYPP_S3_ENCRYPTION": ("ServerSideEncryption", ("AES256", "aws:kms", "aws:kms:dsse")),
    "RAYPP_S3_KMS_KEY": ("SSEKMSKeyId", ()),
    "RAYPP_S3_ACL": ("ACL", ()),
    "RAYPP_S3_BUCKET_OWNER": ("ExpectedBucketOwner", ()),
}
"""Variables whose value requests carry: the parameter, and its values; (): any."""
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


class S3Clients:
    """The current client, shared by all threads. `endpoint`: the server's URL; None for
    AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the profile, or AWS. `access_key`: together with
    `secret_key`; None for boto3's usual sources. `timeout_s`: longest silence on a connection; None
    for RAYPP_STORE_TIMEOUT_S, or `usual_s`. Raises JobError: a setting is invalid; AccessRefused:
    the sources of credentials returned none."""

    def __init__(
        self,
        endpoint: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        timeout_s: float | None = None,
        usual_s: float = SILENCE_S,
    ) -> None:
        self._given_endpoint = endpoint
        self._keys: dict[str, Any] = (
            {"aws_access_key_id": access_key, "aws_secret_access_key": secret_key} if access_key else {}
        )
        self.timeout_s = timeout_s or seconds_from_environment("RAYPP_STORE_TIMEOUT_S") or usual_s
        self._lock = threading.Lock()
        self._client, self._identity = self._build()
        address = str(self._client.meta.endpoint_url)
        self.endpoint: str | None = None if _is_aws(address) else address
        """The server's URL; None for AWS itself."""
        self.proxy = proxy_for(address)
        """See `proxy_for`."""

    @property
    def current(self) -> S3Client:
        return self._client

    def renew(self, refused: S3Client) -> bool:
        """Reads the credentials again, after the server rejected a client's. `refused`: that
        client. Returns whether there are new ones, so that a retry makes sense."""
        with self._lock:
            if refused is not self._client:
                return True
            if self._keys:
                return False
            client, identity = self._build()
            if identity == self._identity:
                return False
            self._client, self._identity = client, identity
            return True

    def _build(self) -> tuple[S3Client, object]:
        # boto3 takes 0.3 s to import: only users of S3 should pay for it.
        import boto3
        import botocore.session
        from botocore.exceptions import BotoCoreError, CredentialRetrievalError

        try:
            core = botocore.session.get_session()
            core.register_component("data_loader", _loader(core.get_config_variable("data_path") or ""))
            profile = core.get_scoped_config()
            session = boto3.session.Session(botocore_session=core)
            # boto3 itself ignores AWS_REGION, which every other AWS SDK reads.
            region = os.environ.get("AWS_REGION") or session.region_name or "us-east-1"
            style = _addressing_style(profile)

            def make(server: str, style: str | None, checksums: str | None) -> S3Client:
                client: S3Client = session.client(
                    "s3",
                    endpoint_url=self._given_endpoint,
                    region_name=region,
                    config=_config(self.timeout_s, style, checksums, direct=is_loopback(server)),
                    **self._keys,
                )
                return client

            # Many servers have no host name per bucket, and respond to boto3's newer checksum
            # headers with errors or damaged bodies: both are used only if set explicitly.
            elsewhere = (style or "path", None if _checksums_are_set(profile) else "when_required")
            # Only a client knows its server for sure, but each costs tens of milliseconds.
            guess = self._given_endpoint or _endpoint_in_environment()
            client = make(guess, *elsewhere) if guess else make(guess, style, None)
            server = str(client.meta.endpoint_url)
            if _is_aws(server) == bool(guess):
                client = make(server, style, None) if _is_aws(server) else make(server, *elsewhere)
            if added := _added_parameters():
                client.meta.events.register("before-parameter-build.s3", partial(_add, added))
            prepare_client(client)
            if not _is_aws(str(client.meta.endpoint_url)):
                client.meta.events.register_last("before-parameter-build.s3", _follow_no_redirect)
            return client, None if self._keys else _identity(core.get_credentials())
        except CredentialRetrievalError as error:
            where = f"AWS_PROFILE={os.environ.get('AWS_PROFILE', 'default')}"
            fix = "run the profile's credential_process by hand to see its error"
            raise AccessRefused(Problem(where, f"cannot get new credentials: {error}", fix)) from error
        except (BotoCoreError, ValueError) as error:
            fault = f"the AWS settings are invalid: {error}"
            raise JobError(Problem("", fault, "check AWS_ENDPOINT_URL_S3, AWS_PROFILE and AWS_REGION")) from error


@cache
def _loader(search_path: str) -> Any:
    """Returns botocore's reader of service descriptions, which keeps what it has parsed. Parsing
    S3's takes two thirds of the time to make a client, and each session would do it again."""
    from botocore.loaders import create_loader

    return create_loader(search_path or None)


def _endpoint_in_environment() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _config(timeout_s: float, style: str | None, checksums: str | None, direct: bool) -> Any:
    from botocore.config import Config

    settings: dict[str, Any] = {"proxies": {}} if direct else {}
    if style is not None:
        settings["s3"] = {"addressing_style": style}
    if checksums is not None:
        settings["request_checksum_calculation"] = checksums
        settings["response_checksum_validation"] = checksums
    return Config(
        connect_timeout=min(CONNECT_S, timeout_s),
        read_timeout=timeout_s,
        # raypp retries: botocore repeats a conditional write that took effect, then says `exists`.
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=CONNECTIONS,
        **settings,
    )


def keys_of_profile() -> dict[str, str]:
    """Returns the keys of AWS_PROFILE, as variables; none if keys or no profile are set. Warns if
    they expire: a machine without the profile's files cannot renew them."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or not os.environ.get("AWS_PROFILE"):
        return {}
    import boto3

    keys = boto3.Session().get_credentials()
    if keys is None:
        return {}
    end = getattr(keys, "_expiry_time", None)  # botocore has no public way to ask
    if end is not None:
        log.warning(
            "the keys of AWS_PROFILE=%s expire at %s, and the run cannot renew them: "
            "for longer runs give the nodes their own role or profile",
            os.environ["AWS_PROFILE"],
            end.isoformat(timespec="minutes"),
        )
    frozen = keys.get_frozen_credentials()
    values = {
        "AWS_ACCESS_KEY_ID": frozen.access_key,
        "AWS_SECRET_ACCESS_KEY": frozen.secret_key,
        "AWS_SESSION_TOKEN": frozen.token,
    }
    return {name: value for name, value in values.items() if value}


def settings_of_profile() -> dict[str, str]:
    """Returns region and server of AWS_PROFILE, as variables, unless variables set them. Raises
    JobError: the profile does not exist, or is invalid."""
    if not os.environ.get("AWS_PROFILE"):
        return {}
    server = S3Clients().endpoint
    import boto3

    settings = {}
    if server and not _endpoint_in_environment():
        settings["AWS_ENDPOINT_URL_S3"] = server
    region_is_set = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region_is_set and (region := boto3.Session().region_name):
        settings["AWS_REGION"] = region
    return settings


def _identity(credentials: Any) -> object:
    from botocore.exceptions import BotoCoreError

    if credentials is None:
        return None
    try:
        frozen = credentials.get_frozen_credentials()
    except BotoCoreError:
        return object()  # the next request reports the error
    return (frozen.access_key, frozen.secret_key, frozen.token)


def _addressing_style(profile: dict[str, Any]) -> str | None:
    """Returns the style of bucket addresses; None if none is set. Styles: `path`
    (http://server/bucket/key), `virtual` (http://bucket.server/key), or `auto`."""
    name, style = "RAYPP_S3_ADDRESSING_STYLE", os.environ.get("RAYPP_S3_ADDRESSING_STYLE", "").strip().lower()
    if not style:
        section = profile.get("s3")
        name, style = "s3.addressing_style", str(section.get("addressing_style", "")) if section else ""
    if style and style not in _STYLES:
        raise JobError(Problem(name, f"{style!r} is not a way to address a bucket", f"use one of {', '.join(_STYLES)}"))
    return style or None


def _checksums_are_set(profile: dict[str, Any]) -> bool:
    names = ("request_checksum_calculation", "response_checksum_validation")
    return any(name in profile or os.environ.get(f"AWS_{name.upper()}") for name in names)


def _added_parameters() -> dict[str, str]:
    """Returns the parameters that the environment adds to every request that accepts them."""
    added: dict[str, str] = {}
    for name, (parameter, values) in _ADDED.items():
        given = os.environ.get(name, "").strip()
        value = next((one for one in values if one.lower() == given.lower()), "" if values else given)
        if given and not value:
            fix = f"leave it empty, or set it to {' or '.join(values)}"
            raise JobError(Problem(name, f"{visible(given)!r} is none of its values", fix))
        added |= {parameter: value} if value else {}
    return added


def _follow_no_redirect(context: dict[str, Any], **_others: Any) -> None:
    """Makes boto3 look for the bucket nowhere else. Only AWS has regions: another server that
    redirects to itself would be asked until the stack overflows."""
    context.setdefault("s3_redirect", {})["redirected"] = True


def _add(added: dict[str, str], params: dict[str, Any], model: Any, **_: Any) -> None:
    """Adds parameters to a request that accepts them."""
    for name in added.keys() & (model.input_shape.members.keys() if model.input_shape is not None else ()):
        params.setdefault(name, added[name])


def _is_aws(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


class RefusedRequest(StoreError):
    """The server does not take this kind of request; the same request fails again."""


def status_of(error: BaseException) -> int:
    """Returns the HTTP status of an error response; 0 if the error is not one."""
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: BaseException) -> str:
    """Returns the S3 error code of an error response; empty if the error is not one."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def _response(error: BaseException) -> Any:
    from botocore.exceptions import ClientError

    return error.response if isinstance(error, ClientError) else {}


def in_brief(text: object) -> str:
    """Returns text of a server, or of an error about it, on one line; cut off if it is long."""
    line = visible(str(text)[: 2 * _LONGEST_TEXT])
    return line if len(line) <= _LONGEST_TEXT else f"{line[: _LONGEST_TEXT - 1]}…"


def may_pass(error: BaseException) -> bool:
    """Returns whether a retry may succeed: no or incomplete response, damaged bytes, 5xx, 429. A
    failed request that changes something may have taken effect nevertheless."""
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


def translated(error: Exception, store: S3Store, key: str, tried: str = "") -> Exception:
    """Translates an error into a `RayppError`; returns errors unrelated to the store unchanged.
    What may be a proxy's doing names the proxy first: anything but an answer with a code of S3.
    `tried`: number and duration of tries, as text, for temporary failures."""
    answer = _translated(error, store, key, tried)
    code = code_of(error)
    if not store.proxy or not isinstance(answer, StoreError) or (code and not code.isdigit()):
        return answer
    (problem,) = answer.problems
    fix = f"{FIX}, or check the proxy; otherwise {problem.fix}" if problem.fix else FIX
    return type(answer)(replace(problem, fault=f"through {store.proxy}: {problem.fault}", fix=fix))


def _translated(error: Exception, store: S3Store, key: str, tried: str) -> Exception:
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
    url = f"{store.url}/{key}" if key else store.url
    after = f", {tried}" if tried else ""
    if isinstance(error, ClientError):
        return _refusal(error, store, url, after)
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        fault = "the S3 server of no embedded cluster runs here, and no credentials for another were found"
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        fix = f"run `raypp local up` if it is the embedded cluster's; else set {keys}"
        return AccessRefused(Problem(store.url, fault, fix))
    if isinstance(error, CredentialRetrievalError):
        fault = f"cannot get new credentials: {in_brief(error)}"
        return AccessRefused(Problem(store.url, fault, "check the profile that AWS_PROFILE names"))
    if isinstance(error, (FlexibleChecksumError, ResponseParserError)):
        fix = "set AWS_RESPONSE_CHECKSUM_VALIDATION=when_required if the server computes checksums differently"
        return StoreError(Problem(url, f"the response is damaged: {in_brief(error)}{after}", fix))
    if is_incomplete_response(error):
        fault = f"was cut off in transit: {in_brief(error)}{after}"
        return StoreError(Problem(url, fault, "check the server and the network"))
    if isinstance(error, (BotoCoreError, HTTPError, OSError)):
        where = store.endpoint or "AWS (AWS_ENDPOINT_URL_S3 is not set)"
        fault = f"no answer from the S3 server at {where}: {in_brief(error)}{after}"
        fix = "check that it runs, that this machine can reach it, and that AWS_ENDPOINT_URL_S3 is its address"
        return ServerNotThere(Problem(url, fault, fix))
    if isinstance(error, _PARSING):
        fault = f"the server's answer cannot be parsed: {in_brief(in_words(error))}"
        return StoreError(Problem(url, fault, "check the server, and every proxy before it"))
    return error


def _refusal(error: Exception, store: S3Store, place: str, after: str) -> RayppError:
    status, code = status_of(error), code_of(error)
    answer = getattr(error, "response", {})
    code, message = in_brief(code), in_brief(answer.get("Error", {}).get("Message", ""))
    at = f" at {store.endpoint}" if store.endpoint else ""
    if code == "NoSuchBucket":
        fault = f"the bucket {store.bucket!r} does not exist{at}"
        return BucketMissing(
            Problem("checkpoint.url", fault, "create it, or correct the name; raypp creates no buckets")
        )
    if code in ("NoSuchKey", "NotFound", "404") or status == 404:
        return NotFound(Problem(place, "there is no such object"))
    fault, fix = _about_the_caller(code, at, answer)
    if fault:
        return AccessRefused(Problem(place, fault, fix))
    if status in (401, 403):
        fix = (
            f"allow the key to list, read, write and delete in the bucket {store.bucket!r}; if its policy asks "
            "for encryption or an ACL on writes, set RAYPP_S3_ENCRYPTION (AES256, aws:kms) or RAYPP_S3_ACL"
        )
        fault = f"access denied{at} ({code or status}{': ' + message if message else ''})"
        return AccessRefused(Problem(place, fault, fix))
    if status == 301 or code in _MOVED:
        fault = f"the bucket is in another region: {message}"
        return StoreError(Problem(place, fault, "set AWS_REGION to the bucket's region"))
    fault = f"the server{at} answered {status} {code}: {message}{after}"
    if status == 429 or (status >= 500 and status not in _STAYING):
        return StoreError(Problem(place, fault, "try again later; check the server if it persists"))
    if may_pass(error):
        return StoreError(Problem(place, fault, "check the network, and every proxy before the server"))
    fix = "check that the server implements S3, and that no proxy changes requests; `raypp doctor --store` tries all"
    return RefusedRequest(Problem(place, fault, fix))


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
