"""Draws a loss curve with characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a braille character, by row (4) and column (2)."""


def loss_curve(
    points: Sequence[tuple[int, float]], *, width: int = 60, height: int = 8, ascii_only: bool = False
) -> list[str]:
    """Draws values over steps.

    Args:
        points: (step, value), in ascending order of steps. Values that are not finite are skipped.
        width: Total width in columns, including labels.
        height: Total height in rows, including the axis and its labels (two rows).
        ascii_only: For terminals that cannot show braille.

    Returns:
        At most `height` lines of at most `width` columns; empty if there are fewer than two values
        to draw.
    """
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return []
    low, high = min(value for _, value in points), max(value for _, value in points)
    labels = _value_labels(low, high)
    margin = max(len(label) for label in labels)
    columns, rows = width - margin - 2, height - 2
    if high == low:
        low, high = low - 0.5, high + 0.5
    lit = _trace(_column_means(points, 2 * columns), low, high, 4 * rows)
    lines = []
    for row in range(rows):
        cells = "".join(_cell(lit, row, column, ascii_only) for column in range(columns)).rstrip()
        label = labels[0] if row == 0 else labels[1] if row == rows - 1 else ""
        edge = ("+" if label else "|") if ascii_only else ("┤" if label else "│")
        lines.append(f"{label:>{margin}} {edge}{cells}")
    corner, line = ("+", "-") if ascii_only else ("└", "─")
    lines.append(f"{'':>{margin}} {corner}{line * columns}")
    lines.append(f"{'':>{margin}}  {_step_labels(points[0][0], points[-1][0], columns)}")
    return lines


def _value_labels(low: float, high: float) -> tuple[str, str]:
    """Returns the top and the bottom label, with up to six digits so that they differ."""
    for digits in range(3, 7):
        labels = f"{high:.{digits}g}", f"{low:.{digits}g}"
        if labels[0] != labels[1]:
            return labels
    return f"{high:.3g}", f"{low:.3g}"


def _step_labels(first: int, last: int, columns: int) -> str:
    """Returns the line below the axis: first and last step, or only the last if space is short."""
    start = f"step {first}"
    room = columns - len(start)
    return f"{start}{last:>{room}}" if room > len(str(last)) else f"{last:>{columns}}"[-columns:]


def _column_means(points: Sequence[tuple[int, float]], columns: int) -> list[tuple[int, float]]:
    """Returns the mean value of each dot column that contains a step."""
    first, last = points[0][0], points[-1][0]
    sums: dict[int, tuple[float, int]] = {}
    for step, value in points:
        column = round((step - first) / (last - first) * (columns - 1))
        total, count = sums.get(column, (0.0, 0))
        sums[column] = total + value, count + 1
    return [(column, total / count) for column, (total, count) in sorted(sums.items())]


def _trace(means: Sequence[tuple[int, float]], low: float, high: float, rows: int) -> set[tuple[int, int]]:
    """Returns the dots (row from the top, column) of an unbroken line through the means."""

    def row_of(value: float) -> int:
        return round((high - value) / (high - low) * (rows - 1))

    lit: set[tuple[int, int]] = set()
    before = row_of(means[0][1])
    for (left, start), (right, end) in itertools.pairwise(means):
        for column in range(left, right + 1):
            row = row_of(start + (end - start) * (column - left) / (right - left))
            # A steep section fills the column between its rows, except for the dot that is already
            # set.
            reach = range(min(before + 1, row), row + 1) if row >= before else range(row, before)
            lit.update((between, column) for between in reach)
            before = row
    return lit


def _cell(lit: set[tuple[int, int]], row: int, column: int, ascii_only: bool) -> str:
    bits = sum(
        _DOTS[dot_row][dot_column]
        for dot_row in range(4)
        for dot_column in range(2)
        if (4 * row + dot_row, 2 * column + dot_column) in lit
    )
    if not bits:
        return " "
    return "*" if ascii_only else chr(_BRAILLE + bits)
