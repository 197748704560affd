"""The relay of a far link (`Network.far_apart`): a rate, and a delay of every packet.

The kernel's own delay (netem) is not on every machine. The relay has a TAP device on each of two
bridges. It holds each packet for the time that its bits take at the rate, and then for the delay. A
packet that would wait longer than `_QUEUE_S` for its turn is dropped, as by a router.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_QUEUE_S = 0.25
_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
_MOST_BYTES = 2048


class _Way:
    """One direction of the link.

    Args:
        source: Descriptor of the TAP that packets are read from.
        to: Descriptor of the other.
        bits: Bits per second.
        delay_s: Seconds of the way.
    """

    def __init__(self, source: int, to: int, bits: float, delay_s: float) -> None:
        self.source, self._to, self._bits, self._delay_s = source, to, bits, delay_s
        self._free_at = 0.0
        self.waiting: deque[tuple[float, bytes]] = deque()

    def take(self, now: float) -> None:
        """Reads one packet, and queues or drops it."""
        packet = os.read(self.source, _MOST_BYTES)
        begin = max(now, self._free_at)
        if begin - now > _QUEUE_S:
            return
        self._free_at = begin + 8 * len(packet) / self._bits
        self.waiting.append((self._free_at + self._delay_s, packet))

    def deliver(self, now: float) -> None:
        """Writes the packets that are due."""
        while self.waiting and self.waiting[0][0] <= now:
            with contextlib.suppress(OSError):  # the device is down
                os.write(self._to, self.waiting.popleft()[1])


def _tap(name: str) -> int:
    """Creates a TAP device; it goes with its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return descriptor


def main() -> None:
    near, far = _tap(sys.argv[1]), _tap(sys.argv[2])
    bits, delay_s = float(sys.argv[3]), float(sys.argv[4])
    ways = {near: _Way(near, far, bits, delay_s), far: _Way(far, near, bits, delay_s)}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        dues = [way.waiting[0][0] for way in ways.values() if way.waiting]
        patience = max(0.0, min(dues) - time.monotonic()) if dues else None
        readable, _, _ = select.select(list(ways), [], [], patience)
        now = time.monotonic()
        for descriptor in readable:
            ways[descriptor].take(now)
        for way in ways.values():
            way.deliver(now)


if __name__ == "__main__":
    main()
