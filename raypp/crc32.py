"""CRC-32, with zlib's values, computed by isal where it is installed. isal uses the processor's
carry-less multiplication, which the zlib of most Linux distributions does not: 12 instead of 3.5
GB/s. A node without isal reads and writes the same checkpoints."""

import zlib

from typing_extensions import Buffer

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:  # no wheel for this machine, or a node that was installed before raypp used it
    _crc32 = zlib.crc32


def crc32(data: Buffer, before: int = 0) -> int:
    """Continues the CRC-32 `before` over these bytes; releases the GIL for more than 5 KiB."""
    value: int = _crc32(data, before)
    return value
