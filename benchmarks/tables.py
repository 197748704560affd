"""Parts of the Markdown tables that benchmarks print."""

import statistics
from collections.abc import Sequence


def head(titles: str) -> str:
    """Returns the first lines of a table, after an empty one; `titles`: as in `speed | CPU`."""
    return f"\n| {titles} |\n|{'---|' * (titles.count(' | ') + 1)}"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Formats the median, and the range if there are several values: `1.23 (1.10 to 1.40)`."""
    middle, least, most = (f"{one:.{digits}f}" for one in (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({least} to {most})"
