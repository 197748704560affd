"""Sends parts of an object in memory to S3: concurrently, without copies, under a rate limit."""

from __future__ import annotations

import copy
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from raypp.storage.byte_source import MemorySource
from raypp.storage.other_traffic import LOW_PRIORITY

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_LONGEST_PIECE = 4 << 20
_FAST_S = 0.02
"""Pieces double while each takes less than this, so that few system calls and thread switches are
made, and the socket's timeout covers no more than a moment of a slow network."""
_PRIORITY_FILLER = 1
"""Linux's TC_PRIO_FILLER: last in the sender's own queue."""


class PartBody:
    """A part as the file object that boto3 expects; reads return views of the memory.

    The rate limit applies only while a part is sent, not while it is read for a signature or a
    checksum.
    """

    def __init__(self, source: MemorySource, start: int, end: int) -> None:
        self._source, self._start, self._end = source, start, end
        self._views = source.views(start, end)
        self._place = 0
        self._piece_bytes, self._handed_at = source.pace.piece_bytes, 0.0
        self.sending = False
        self.summed = False
        """Whether a header carries its CRC-32 and the server compares it. The signature then omits
        the body: signing costs a SHA-256 of every byte on both sides, more than everything else
        together."""

    def __len__(self) -> int:
        return self._end - self._start

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, len(self))[whence]
        self._piece_bytes, self._handed_at = self._source.pace.piece_bytes, 0.0
        return self._place

    def crc32(self) -> int:
        return self._source.crc32(self._start, self._end)

    def read(self, size: int | None = -1) -> memoryview | bytes:
        """Returns the next piece as a view.

        While sending, the rate limit and the network set the piece's size, whatever was requested:
        boto3's HTTP client requests 16 KiB, each of which would cost a system call and a thread
        switch.
        """
        wanted = self._next_piece() if self.sending or size is None or size < 0 else size
        begin = 0
        for view in self._views:
            if self._place < begin + len(view):
                piece = view[self._place - begin :][:wanted]
                if self.sending:
                    self._source.pace.take(len(piece))
                self._place += len(piece)
                self._handed_at = time.monotonic()
                return piece
            begin += len(view)
        return b""

    def _next_piece(self) -> int:
        """Returns the bytes of the next piece; the last one has been sent when it is asked for."""
        pace = self._source.pace
        if pace.bytes_per_s or not self.sending:
            return pace.piece_bytes
        if self._handed_at:
            fast = time.monotonic() - self._handed_at < _FAST_S
            self._piece_bytes = min(2 * self._piece_bytes, _LONGEST_PIECE) if fast else pace.piece_bytes
        return self._piece_bytes


def send_parts(
    source: MemorySource, part_bytes: int, in_flight: int, send: Callable[[int, PartBody], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Sends all parts, the first one last.

    Args:
        source: The object.
        part_bytes: Size of each part but the last.
        in_flight: Number of parts sent concurrently.
        send: (number from 1, body) -> what the completion needs about this part; called in threads.

    Returns:
        What `send` returned, in the order of the parts.

    Raises:
        Whatever `send` raised first; parts not yet begun are then not sent.
    """
    starts = range(0, source.size, part_bytes)

    def send_one(index: int) -> dict[str, Any]:
        start = starts[index]
        return send(index + 1, PartBody(source, start, min(start + part_bytes, source.size)))

    with ThreadPoolExecutor(in_flight, thread_name_prefix="raypp-upload") as pool:
        futures = {index: pool.submit(send_one, index) for index in [*range(1, len(starts)), 0]}
        wait(futures.values(), return_when="FIRST_EXCEPTION")
        for future in futures.values():
            future.cancel()
        for future in futures.values():
            if not future.cancelled() and (error := future.exception()) is not None:
                raise error
        return [futures[index].result() for index in range(len(starts))]


def prepare_client(client: S3Client) -> None:
    """Makes a client send `PartBody`s under their rate limit, with low priority where possible.

    Must be called before the client's first request.
    """
    # The signer listens to this event too; "last" on one operation's own event would still precede
    # it.
    client.meta.events.register_first("request-created.s3", _signing)
    client.meta.events.register_last("request-created.s3", _sending)
    # botocore has no setting for socket options; its session passes this list to every new
    # connection.
    options = getattr(getattr(getattr(client, "_endpoint", None), "http_session", None), "_socket_options", None)
    if isinstance(options, list):
        options.extend(low_priority_options())


def low_priority_options() -> list[tuple[int, int, int]]:
    """Returns the socket options for low-priority traffic that this machine accepts."""
    wanted = [(socket.IPPROTO_IP, socket.IP_TOS, LOW_PRIORITY)]
    if hasattr(socket, "SO_PRIORITY"):
        wanted.append((socket.SOL_SOCKET, socket.SO_PRIORITY, _PRIORITY_FILLER))
    accepted = []
    with socket.socket() as scratch:
        for option in wanted:
            try:
                scratch.setsockopt(*option)
            except OSError:
                continue
            accepted.append(option)
    return accepted


def _signing(request: Any, **_others: Any) -> None:
    if isinstance(request.data, PartBody):
        request.data.seek(0)  # this may be a retry of the part
        request.data.sending = False
        if request.data.summed:
            # botocore has this setting only per client; the context belongs to the request.
            config = copy.copy(request.context["client_config"])
            config.s3 = {**(config.s3 or {}), "payload_signing_enabled": False}
            request.context["client_config"] = config


def _sending(request: Any, **_others: Any) -> None:
    if isinstance(request.data, PartBody):
        request.data.sending = True
