"""Boxes within a tensor: whether the slices that a checkpoint holds cover it, without overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

Box = tuple[tuple[int, int], ...]
"""Begin and end per dimension, in the global tensor."""
_MOST_CELLS = 1 << 20


def volume(box: Box) -> int:
    return prod(end - begin for begin, end in box)


def cover_once(boxes: Sequence[Box], whole: Box) -> bool:
    """Returns whether every element of a box lies in exactly one of these boxes.

    Args:
        boxes: Parts of `whole`, none empty.
        whole: The box to cover.
    """
    if sum(volume(box) for box in boxes) != volume(whole):
        return False
    if len(boxes) < 2:
        return True
    # The volumes add up, so boxes without overlaps leave no gap. All edges together cut the whole
    # into cells, of which each box takes some.
    cuts = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(whole))]
    places = [{edge: place for place, edge in enumerate(edges)} for edges in cuts]
    shape = [len(edges) - 1 for edges in cuts]
    if prod(shape) > _MOST_CELLS:
        return False  # no mesh cuts a tensor like that
    taken = np.zeros(shape, dtype=bool)
    for box in boxes:
        cells = taken[tuple(slice(at[begin], at[end]) for at, (begin, end) in zip(places, box, strict=True))]
        if cells.any():
            return False
        cells[...] = True
    return True
