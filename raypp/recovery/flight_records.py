"""Says from torch's flight recorders in which communicator ranks stand, and who has started what.

A record is the JSON of a rank: its latest operations, each with its group, its number there, and
`scheduled` (queued by the host), `started` (by the device) or `completed`.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

WITHOUT = "torch was built without a flight recorder that knows these collectives"
_SHOWN = 8
_WORDS = {"started": "started by", "scheduled": "only queued by", "": "not queued by", "completed": "done by"}


def pending(record: str) -> list[dict[str, Any]]:
    """Returns the operations of a rank that are not completed, oldest first."""
    return [entry for entry in _document(record).get("entries", []) if _state(entry) != "completed"]


def stuck_collectives(records: Mapping[int, str], labels: Mapping[int, str]) -> list[str]:
    """Returns a line for each communicator in which ranks wait: who has started, and who has not.

    Args:
        records: By rank; "" where torch has no recorder.
        labels: Of all ranks.
    """
    if not any(records.values()):
        return [WITHOUT if records else "no rank gave its flight record"]
    documents = {rank: _document(record) for rank, record in records.items() if record}
    found: dict[tuple[str, str], dict[int, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    messages = []
    for rank, document in documents.items():
        for entry in document.get("entries", []):
            name, description = (str(word) for word in entry.get("process_group", ("?", "")))
            if not entry.get("is_p2p"):
                found[name, description][rank][int(entry.get("collective_seq_id", 0))] = entry
            elif _state(entry) != "completed":
                state = _state(entry).replace("scheduled", "only queued")
                messages.append(f"{labels[rank]}: {entry.get('profiling_name')} in {description or name}, {state}")
    described = [_line(group, ranks, _members(group[0], documents), labels) for group, ranks in found.items()]
    lines = [line for line in described if line]
    lines += dict.fromkeys(messages)
    silent = [labels[rank] for rank in labels if not records.get(rank)]
    lines += [f"no flight record of {', '.join(silent[:_SHOWN])}"] if silent else []
    return lines[: 4 * _SHOWN] or ["by their flight records the ranks have no operation that is not completed"]


def _line(
    group: tuple[str, str],
    ranks: Mapping[int, Mapping[int, Mapping[str, Any]]],
    members: set[int],
    labels: Mapping[int, str],
) -> str:
    """Describes the first operation of a communicator that a rank has not completed; "" if none."""
    open_ones = [number for own in ranks.values() for number, entry in own.items() if _state(entry) != "completed"]
    if not open_ones:
        return ""
    first, states = min(open_ones), defaultdict(list)
    for rank in sorted(members | ranks.keys()):
        own = ranks.get(rank, {})
        # The recorder keeps the latest operations: an older one that is missing is completed.
        state = _state(own[first]) if first in own else "completed" if max(own, default=-1) > first else ""
        states[state].append(labels.get(rank, f"rank {rank}"))
    name = next(own[first].get("profiling_name") for own in ranks.values() if first in own)
    parts = [f"{words} {', '.join(states[state][:_SHOWN])}" for state, words in _WORDS.items() if states[state]]
    return f"{name} {first} of communicator {group[1] or 'unnamed'} (group {group[0]}): {'; '.join(parts)}"


def _members(name: str, documents: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """Returns the ranks of a group, as far as a recorder knows them: gloo's does not."""
    texts = [document.get("pg_config", {}).get(name, {}).get("ranks", "") for document in documents.values()]
    return {
        int(rank) for text in texts for rank in str(text).strip("[] ").replace(" ", "").split(",") if rank.isdecimal()
    }


def _state(entry: Mapping[str, Any]) -> str:
    if entry.get("retired"):
        return "completed"
    state = str(entry.get("state", ""))
    return "started" if str(entry.get("profiling_name")).startswith("gloo:") else state  # gloo queues nothing


def _document(record: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        return dict(json.loads(record))
    return {}
