"""Says from torch's flight recorders in which communicator ranks stand, and who has started what. A
record is JSON: a rank's latest operations, each with its group, its number there, and whether it is
`scheduled` (queued by the host), `started` (by the device) or `completed`."""

from __future__ import annotations

import contextlib
import json
import re
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
    `records`: by rank; "" where torch has no recorder."""
    if not any(records.values()):
        return [WITHOUT if records else "no rank gave its flight record"]
    found: dict[tuple[str, str], dict[int, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    members: dict[str, set[int]] = defaultdict(set)  # gloo's recorder does not know them
    messages = []
    for rank, document in ((rank, _document(record)) for rank, record in records.items()):
        for name, group in document.get("pg_config", {}).items():
            members[name].update(int(number) for number in re.findall(r"\d+", str(group.get("ranks"))))
        for entry in document.get("entries", []):
            name, description = (str(word) for word in entry.get("process_group", ("?", "")))
            if not entry.get("is_p2p"):
                found[name, description or "unnamed"][rank][int(entry.get("collective_seq_id", 0))] = entry
            elif (state := _state(entry)) != "completed":
                state = state.replace("scheduled", "only queued")
                messages.append(f"{labels[rank]}: {entry.get('profiling_name')} in {description or name}, {state}")
    described = [_line(group, ranks, members[group[0]], labels) for group, ranks in found.items()]
    lines = [*filter(None, described), *dict.fromkeys(messages)]
    silent = [labels[rank] for rank in labels if not records.get(rank)]
    lines += [f"no flight record of {', '.join(silent[:_SHOWN])}"] if silent else []
    return lines[: 4 * _SHOWN] or ["by their flight records the ranks have no operation that is not completed"]


def _line(
    group: tuple[str, str], ranks: Mapping[int, Mapping[int, Any]], members: set[int], labels: Mapping[int, str]
) -> str:
    """Describes the first operation of a communicator that a rank has not completed; "" if none."""
    waiting = [
        number for entries in ranks.values() for number, entry in entries.items() if _state(entry) != "completed"
    ]
    if not waiting:
        return ""
    first, states = min(waiting), defaultdict(list)
    for rank in sorted(members | ranks.keys()):
        entries = ranks.get(rank, {})
        # The recorder keeps the latest operations: an older one that is missing is completed.
        state = _state(entries[first]) if first in entries else "completed" if max(entries, default=-1) > first else ""
        states[state].append(labels.get(rank, f"rank {rank}"))
    name = next(entries[first].get("profiling_name") for entries in ranks.values() if first in entries)
    parts = [f"{words} {', '.join(states[state][:_SHOWN])}" for state, words in _WORDS.items() if states[state]]
    return f"{name} {first} of communicator {group[1]} (group {group[0]}): {'; '.join(parts)}"


def _state(entry: Mapping[str, Any]) -> str:
    if entry.get("retired"):
        return "completed"
    begun = str(entry.get("profiling_name")).startswith("gloo:")  # gloo queues nothing
    return "started" if begun else str(entry.get("state", ""))


def _document(record: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        return dict(json.loads(record))
    return {}
