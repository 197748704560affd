"""How much text token ids stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypp.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer


def text_bytes(tokenizer: Tokenizer, ids: NDArray[np.integer[Any]]) -> int | None:
    """Returns the bytes, in UTF-8, of the text of ids `[n]`; None if they are not from text."""
    if isinstance(tokenizer, ByteTokenizer):
        return len(ids)
    if isinstance(tokenizer, FileTokenizer):
        return len(tokenizer.decode(ids.tolist()).encode("utf-8"))
    return None
