"""Changes a valid input in one to four places: by the structure of its JSON, or by its bytes."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

_DIGITS, _DEEP, _WIDE = "@digits", "@deep", "@wide"
"""Stand for JSON that Python does not write: see `_dump`."""

NUMBERS = (
    -1, 0, 1, 2, 7, 255, 65536, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**9, 10**18, 10**400,
    -(2**63), -(10**18), 0.5, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    "", "a", "a" * 5000, "0", "-1", "1e9", "NaN", "../../../etc/passwd", "/etc/passwd", "a/../b", ".", "..", "\x00",
    "\x1b]0;title\x07", "\x1b[2J", "\n", "\u202e", "\ud800", "[red]", "[/]", "<script>", "%s%n", "{0}", "os:system",
    "__class__", "F32", "nan", "é" * 300, "a.b.c", "layers.99999.x",
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, _DIGITS, _DEEP, _WIDE)
_BYTES = (b"\x00", b"\xff", b"\x00" * 8, b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"{", b"}", b"[", b"]", b'"', b",", b":",
          b"\\", b"\n", b"\r\n", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"NaN", b"-", b"1e999", b"null", b"\x1b[2J",
          b"9" * 5000, b"[" * 5000, b'{"a":' * 5000, b" " * 5000)  # fmt: skip


def mutated(random: Random, samples: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """Returns a changed sample; the same for the same state of `random`."""
    data = random.choice(samples)
    if random.random() < 0.7:
        data = _by_structure(random, data)
    if random.random() < 0.4:
        for _ in range(random.choice((1, 1, 2, 4))):
            data = _by_bytes(random, data, samples, words)
    return data


def _by_structure(random: Random, data: bytes) -> bytes:
    """Changes JSON, a line of JSON, or JSON behind its length; anything else is returned."""
    length = int.from_bytes(data[:8], "little")
    if 0 < length <= len(data) - 8 and (found := _parsed(data[8 : 8 + length])) is not None:
        header = _dump(_changed(random, found))
        if random.random() < 0.9:
            length = len(header)
        return length.to_bytes(8, "little") + header + data[8 + length :]
    if (found := _parsed(data)) is not None:
        return _dump(_changed(random, found))
    lines = data.split(b"\n")
    places = [place for place, line in enumerate(lines) if _parsed(line) is not None]
    if places:
        for _ in range(random.choice((1, 1, 2, 4))):
            place = random.choice(places)
            lines[place] = _dump(_changed(random, _parsed(lines[place])))
    return b"\n".join(lines)


def _parsed(data: bytes) -> Any:
    """Returns an object or a list; None for anything else."""
    if data[:1] not in (b"{", b"["):
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _dump(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"))
    for name, meant in ((_DIGITS, "9" * 5000), (_DEEP, "[" * 3000 + "]" * 3000), (_WIDE, f"[{'0,' * 20_000}0]")):
        text = text.replace(json.dumps(name), meant)
    return text.encode()


def _changed(random: Random, value: Any) -> Any:
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        value = _changed_once(random, value)
    return value


def _changed_once(random: Random, value: Any) -> Any:
    places = list(_places(value))
    if not places:
        return _another(random, value)
    holder, key = random.choice(places)
    there = holder[key]
    match random.randrange(9):
        case 0 | 1 | 2:
            holder[key] = _another(random, there)
        case 3:
            del holder[key]
        case 4 if isinstance(holder, dict):
            holder[random.choice(TEXTS)] = there
        case 4:
            holder.insert(key, there)
        case 5:
            other, name = random.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                holder[key] = _copied(other[name])
        case 6 if isinstance(there, dict):
            there[random.choice(TEXTS)] = _another(random, None)
        case 6 if isinstance(there, list):
            holder[key] = there * random.choice((0, 2, 100))
        case 7 if isinstance(there, str) and _parsed(there.encode(errors="replace")) is not None:
            holder[key] = _dump(_changed(random, _parsed(there.encode()))).decode()  # JSON within JSON
        case 7 if isinstance(there, list | dict):
            holder[key] = dict.fromkeys(map(str, there), 0) if isinstance(there, list) else list(there.values())
        case _:
            holder[key] = _near(random, there)
    return value


def _places(value: Any) -> Any:
    """Yields (container, key) of every value within."""
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, dict | list):
            for key in holder if isinstance(holder, dict) else range(len(holder)):
                yield holder, key
                waiting.append(holder[key])


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value)) if isinstance(value, dict | list) else value


def _another(random: Random, there: Any) -> Any:
    return _copied(random.choice(random.choice((NUMBERS, TEXTS, _OTHERS))))


def _near(random: Random, there: Any) -> Any:
    """Returns a value of the same type, or the same value as another type."""
    if isinstance(there, bool) or there is None:
        return not there
    if isinstance(there, int | float):
        usual = abs(there) < 1e300
        near = [
            -there,
            there * 2,
            str(there)[:50],
            *([float(there), round(there) + 1, round(there) - 1] if usual else []),
        ]
        return random.choice(near)
    if isinstance(there, str):
        place = random.randint(0, len(there))
        before, behind = there[:place], there[place:]
        return random.choice((before, behind, before + random.choice(TEXTS) + behind, there.upper(), there * 2))
    return _another(random, there)


def _by_bytes(random: Random, data: bytes, samples: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    start = random.randint(0, len(data))
    end = min(len(data), start + random.choice((1, 1, 2, 8, 64, 1024)))
    match random.randrange(9):
        case 0:
            return data[:start]
        case 1:
            return data[:start] + data[end:]
        case 2:
            return data[:end] + data[start:end] * random.choice((1, 1, 10, 300)) + data[end:]
        case 3:
            other = random.choice(samples)
            return data[:start] + other[random.randint(0, len(other)) :]
        case 4 if data:
            place = min(start, len(data) - 1)
            return data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]
        case 5:
            return data[:start] + random.randbytes(end - start) + data[end:]
        case 6:
            number = random.choice((-1, 0, 1, 2**31, 2**63 - 1, 10**18, len(data), len(data) + 1))
            return data[:start] + number.to_bytes(8, "little", signed=True) + data[start + 8 :]
        case _:
            word = random.choice(words) if words and random.random() < 0.6 else random.choice(_BYTES)
            return data[:start] + word + data[random.choice((start, end)) :]
