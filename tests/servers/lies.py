"""What a server can answer instead of the truth: a table of lies for `FaultProxy`."""

import itertools
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

from fault_proxy import Answer, Lie, Request, Wanted, asks

_EVERY_ENTRY = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_PATIENT_S = 8.0


_is_list, _is_head = asks("GET", "list-type=2"), asks("HEAD")


def _is_get(request: Request) -> bool:
    return request.method == "GET" and "list-type=2" not in request.target and "uploads" not in request.target


def _is_read(request: Request) -> bool:
    return request.method in ("GET", "HEAD")


def _is_write(request: Request) -> bool:
    return request.method in ("PUT", "POST", "DELETE")


def _any(_request: Request) -> bool:
    return True


def answer(
    client: socket.socket, status: int, headers: dict[str, str], body: bytes = b"", length: str | None = None
) -> None:
    """Sends an answer. `length`: the Content-Length, None: the true one, empty: none."""
    reported = {**headers, "content-length": str(len(body)) if length is None else length, "connection": "close"}
    if length == "":
        del reported["content-length"]
    head = "".join(f"{name}: {value}\r\n" for name, value in reported.items())
    client.sendall(f"HTTP/1.1 {status} Told\r\n{head}\r\n".encode("latin-1") + body)


def _endlessly(client: socket.socket, piece: bytes, pause_s: float = 0.0) -> None:
    """Sends a piece again and again, until the client hangs up or the test is over."""
    end = time.monotonic() + _PATIENT_S
    with suppress(OSError):
        while time.monotonic() < end:
            client.sendall(piece)
            time.sleep(pause_s)


def _page(change: Callable[[bytes, Request], bytes]) -> Lie:
    """Changes the XML of a listing."""

    def lie(client: socket.socket, request: Request, real: Answer) -> None:
        answer(client, real.status, real.headers, change(real.body, request) if real.status == 200 else real.body)

    return lie


def _document(body: bytes, status: int = 200) -> Lie:
    return lambda client, _request, _real: answer(client, status, {"content-type": "application/xml"}, body)


def _truncated(body: bytes, token: str) -> bytes:
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>".encode()
    return re.sub(rb"<NextContinuationToken>.*?</NextContinuationToken>", b"", body).replace(
        b"<IsTruncated>false</IsTruncated>", more
    )


def _prefix(request: Request) -> str:
    return parse_qs(urlsplit(request.target).query).get("prefix", [""])[0]


def _entry(key: str, size: str = "1") -> bytes:
    return (
        f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;0&quot;</ETag>"
        f"<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    ).encode()


def _with(*entries: Callable[[str], bytes]) -> Lie:
    """Replaces the entries of a listing; each is made from the prefix."""

    def change(body: bytes, request: Request) -> bytes:
        rest = _EVERY_ENTRY.sub(b"", body)
        return rest.replace(
            b"</ListBucketResult>", b"".join(e(_prefix(request)) for e in entries) + b"</ListBucketResult>"
        )

    return _page(change)


def _endless_pages(keys: int) -> Lie:
    numbers = itertools.count()

    def change(body: bytes, request: Request) -> bytes:
        entries = b"".join(_entry(f"{_prefix(request)}z{next(numbers):09}") for _ in range(keys))
        rest = _EVERY_ENTRY.sub(b"", body).replace(b"</ListBucketResult>", entries + b"</ListBucketResult>")
        return _truncated(rest, f"t{next(numbers)}")

    return _page(change)


def _edit(pattern: bytes, by: bytes) -> Lie:
    return _page(lambda body, _request: re.sub(pattern, by, body))


def _headers(**changed: str) -> Lie:
    """Changes headers of the real answer; a length is told, whatever the body has."""

    def lie(client: socket.socket, request: Request, real: Answer) -> None:
        wanted = {name.replace("_", "-"): value for name, value in changed.items()}
        length = wanted.pop("content-length", None)
        headers = {**real.headers, **wanted}
        reported = headers.pop("content-length", None) if length is None else length
        answer(client, real.status, headers, real.body, reported if request.method == "HEAD" else length)

    return lie


def _cut(client: socket.socket, _request: Request, real: Answer) -> None:
    answer(client, real.status, real.headers, real.body[: len(real.body) // 2], str(len(real.body)))


def _endless(client: socket.socket, _request: Request, real: Answer) -> None:
    answer(client, real.status, real.headers, real.body, "")
    _endlessly(client, b"x" * (1 << 20))


def _endless_announced(client: socket.socket, _request: Request, real: Answer) -> None:
    headers = {name: value for name, value in real.headers.items() if name != "content-range"}
    answer(client, 200, headers, b"", str(1 << 45))
    _endlessly(client, b"x" * (1 << 20))


def _trickled_body(client: socket.socket, _request: Request, real: Answer) -> None:
    answer(client, real.status, real.headers, b"", str(len(real.body) + 100_000))
    _endlessly(client, b"x", 0.05)


def _trickled_head(client: socket.socket, _request: Request, _real: Answer) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    _endlessly(client, b"x", 0.05)


def _continue(client: socket.socket, _request: Request, _real: Answer) -> None:
    _endlessly(client, b"HTTP/1.1 100 Continue\r\n\r\n", 0.01)


def _silent(client: socket.socket, _request: Request, _real: Answer) -> None:
    client.settimeout(_PATIENT_S)
    with suppress(OSError):
        client.recv(1)


def _garbage(client: socket.socket, _request: Request, _real: Answer) -> None:
    client.sendall(b"\x00\xff\x1b]0;owned\x07" * 1000)


def _closed(_client: socket.socket, _request: Request, _real: Answer) -> None:
    pass


def redirect(status: int, to: str) -> Lie:
    """Redirects to a URL; empty: to the request itself."""

    def lie(client: socket.socket, request: Request, _real: Answer) -> None:
        location = to + request.target if to else f"http://{request.headers['host']}{request.target}"
        body = b"<Error><Code>PermanentRedirect</Code><Message>elsewhere</Message></Error>" if status == 301 else b""
        answer(client, status, {"location": location}, b"" if request.method == "HEAD" else body)

    return lie


def _error(code: str, message: str = "refused") -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


_BOMB = (
    b'<?xml version="1.0"?><!DOCTYPE b [<!ENTITY a0 "aaaaaaaaaa">'
    + b"".join(
        f'<!ENTITY a{level} "{f"&a{level - 1};" * 10}">'.encode() for level in range(1, 10)
    )
    + b"]><ListBucketResult><Name>&a9;</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
)  # fmt: skip
_DEEP = b"<ListBucketResult>" + b"<a>" * 300_000 + b"</a>" * 300_000 + b"</ListBucketResult>"

_LESS_DEEP_ERROR = b"<Error><Code>Bad</Code>" + b"<a>" * 9000 + b"</a>" * 9000 + b"</Error>"

LIES: dict[str, tuple[Wanted, Lie]] = {
    "a listing that continues with the same token": (_is_list, _page(lambda body, _: _truncated(body, "same"))),
    "a listing of empty pages": (_is_list, _endless_pages(0)),
    "a listing of one new key a page": (_is_list, _endless_pages(1)),
    "a listing that continues without a token": (
        _is_list,
        _edit(b"<IsTruncated>false</IsTruncated>", b"<IsTruncated>true</IsTruncated>"),
    ),
    "keys that are not below the prefix": (_is_list, _with(lambda _: _entry("elsewhere/status.json"))),
    "keys with ..": (_is_list, _with(lambda p: _entry(f"{p}../../etc/passwd"))),
    "keys with a line feed": (_is_list, _with(lambda p: _entry(f"{p}step-00000001/COMMIT%0A%1B[2J"))),
    "keys that are no XML": (_is_list, _with(lambda p: _entry(f"{p}a\x00b"))),
    "keys without an end": (_is_list, _with(lambda p: _entry(f"{p}{'x' * 100_000}"))),
    "entries without a size": (_is_list, _edit(b"<Size>.*?</Size>", b"")),
    "entries without a time": (_is_list, _edit(b"<LastModified>.*?</LastModified>", b"")),
    "listed sizes below 0": (_is_list, _edit(b"<Size>.*?</Size>", b"<Size>-1</Size>")),
    "listed sizes that are text": (_is_list, _edit(b"<Size>.*?</Size>", b"<Size>many</Size>")),
    "times of no calendar": (
        _is_list,
        _edit(b"<LastModified>.*?</LastModified>", b"<LastModified>0000-13-99</LastModified>"),
    ),
    "times of the year 1": (
        _is_list,
        _edit(b"<LastModified>.*?</LastModified>", b"<LastModified>0001-01-01T00:00:00Z</LastModified>"),
    ),
    "listings cut short": (_is_list, _page(lambda body, _: body[: len(body) // 2])),
    "listings that are empty": (_is_list, _document(b"")),
    "listings that are HTML": (_is_list, _document(b"<html><body>Please log in<br></body></html>")),
    "listings of another kind": (_is_list, _document(b"<Other><Name>x</Name></Other>")),
    "listings that are a bomb": (_is_list, _document(_BOMB)),
    "listings that are deep": (_is_list, _document(_DEEP)),
    "heads of sizes below 0": (_is_head, _headers(content_length="-5")),
    "heads of other sizes": (_is_head, _headers(content_length="123456789")),
    "heads of no time": (_is_head, _headers(last_modified="yesterday")),
    "heads that are all there": (_is_head, lambda c, _, __: answer(c, 200, {"last-modified": _TIME}, b"", "7")),
    "bodies cut short": (_is_get, _cut),
    "bodies without end": (_is_get, _endless),
    "bodies of 32 TiB": (_is_get, _endless_announced),
    "bodies a byte at a time": (_is_get, _trickled_body),
    "bodies of another range": (_is_get, _headers(content_range="bytes 7-20/21")),
    "bodies of a length that is text": (_is_get, _headers(content_length="many")),
    "wrong checksums": (_is_get, _headers(x_amz_checksum_crc32="AAAAAA==", x_amz_checksum_type="FULL_OBJECT")),
    "heads a byte at a time": (_is_read, _trickled_head),
    "100 Continue without end": (_is_read, _continue),
    "writes that answer deep errors": (_is_write, _document(_LESS_DEEP_ERROR, 400)),
    "writes that answer an error": (_is_write, _document(_error("InternalError"))),
    "writes that answer nothing": (_is_write, _silent),
    "no answers": (_any, _silent),
    "garbage": (_any, _garbage),
    "closed connections": (_any, _closed),
    "503 for ever": (_any, _document(_error("SlowDown"), 503)),
    "403 for ever": (_any, _document(_error("AccessDenied", "\x1b]0;owned\x07"), 403)),
    "errors that are a bomb": (_any, _document(_BOMB, 400)),
    "errors with control characters": (_any, _document(_error("Bad&#x9b;", "&#x85;m&#x202e;[bold]"), 400)),
    "redirects to itself (301)": (_any, redirect(301, "")),
    "redirects to itself (302)": (_any, redirect(302, "")),
    "404 of everything": (_any, _document(_error("NoSuchKey"), 404)),
    "status 999": (_any, _document(b"", 999)),
}
"""What it is -> (the requests that it meets, the lie)."""

_TIME = "Thu, 01 Jan 2026 00:00:00 GMT"
