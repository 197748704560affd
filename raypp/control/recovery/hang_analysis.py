"""Finds the rank to blame for a hang, from what every rank was last known to do.

Every rank marks what it does. On a GPU the host queues a whole step within moments, so there a mark
counts once the device has come to it. This module understands these marks of `raypp.rank`:

| mark | the rank |
|---|---|
| `step 12 read` | reads its rows of step 12 |
| `step agree`, `step sum`, `step replicas`, `step clocks` | is in a collective of all ranks |
| `step replica agree`, `step replica sum` | is in a collective of its replica, which trains apart |
| `step outer` | is in an exchange of all replicas that train apart |
| `step tie` | is in a collective of the two ends of the pipeline |
| `step 1F7`, `step 1B7`, `step 1I7`, `step 1W7` | computes microbatch 7 of stage 1 |
| `step 1F7 waits` | waits for the message it needs: activations of stage 0 |
| `step 1B7 waits` | waits for the message it needs: gradients of stage 2 |
| `step sums` | is in a sum of gradients over the ranks of its stage |
| `step tensor sum` | is in the sum of gradients over the ranks that compute each layer with it |
| `step sends` | waits until its last messages have been taken |
| `step update` | updates its weights |
| `rendezvous`, `build`, `load`, `finish` | does what the mark says |
| `save …`, `evaluate …`, `sample …` | does what the mark says |
"""

import contextlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from raypp.records import Coordinates

_WORK = re.compile(r"(?:step|evaluate) (\d+)([FBIW])(\d+)( waits)?")
_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
_COLLECTIVE_NAMES = {
    "agree": "the agreement on the step",
    "sum": "the sum of loss and norms",
    "outer": "the exchange of an outer step",
    "replicas": "the comparison of replicas",
    "clocks": "the comparison of clocks",
    "tie": "the sum of the tied embedding's gradients",
    "sums": "the sum of gradients",
    "tensor sum": "the sum of gradients over tp",
}
_LONGEST_CHAIN = 5

WITHOUT = "torch was built without a flight recorder that knows these collectives"
_SHOWN = 8
_WORDS = {"started": "started by", "scheduled": "only queued by", "": "not queued by", "completed": "done by"}


@dataclass(frozen=True)
class RankActivity:
    """What one rank was last known to do.

    Attributes:
        idle_s: Seconds since that mark.
        inside: The collective or message in which its thread waits, by its stack; "" when in none
            or unknown.
        reached: Marks that its device has come to in this attempt, if `phase` says where the device
            is. The ranks of a stage make the same marks. 0: `phase` is what the host does.
    """

    rank: int
    label: str
    coordinates: Coordinates
    phase: str
    idle_s: float
    node: str = ""
    pid: int = 0
    silent: bool = False
    inside: str = ""
    reached: int = 0


@dataclass(frozen=True)
class Blame:
    """The cause of a hang. `rank`: the rank for which all others wait. None: nobody is known to be
    late, because the ranks wait for each other, or all are in the same collective. `cause`: the
    chain of waits that ends with it, as text. `ring`: the ranks wait for each other: a deadlock, or
    a link that carries nothing."""

    rank: int | None
    cause: str
    ring: bool = False


@dataclass(frozen=True)
class _Wait:
    """One rank waits for others; `words` are part of the message."""

    words: str
    ranks: tuple[int, ...]


def find_culprit(activities: Sequence[RankActivity], rank_of_stage: Sequence[int]) -> Blame:
    """Follows every rank's wait to its end."""
    waits = [_wait_of(activity, activities, rank_of_stage) for activity in activities]
    chains = [_chain(rank, waits, activities) for rank in range(len(activities))]
    reached = Counter(chain[-1] for chain in chains)

    def weight(rank: int) -> tuple[bool, int, float]:
        return activities[rank].silent, reached[rank], activities[rank].idle_s

    culprit = max(reached, key=weight)
    chain = max((chain for chain in chains if chain[-1] == culprit), key=len)
    last, wait = activities[culprit], waits[culprit]
    back = next((rank for rank in wait.ranks if rank in chain), None) if wait is not None else None
    if back is not None and not last.silent:
        return Blame(None, _ring_text(chain[chain.index(back) :], waits, activities), ring=True)
    if (together := _collective(last)) and not last.silent:
        since = f"for {last.idle_s:.0f} s"
        return Blame(None, f"all its ranks have been in {together} {since}; which of them does not come is unknown")
    return Blame(culprit, _chain_text(chain, waits, activities))


def activity_table(activities: Sequence[RankActivity]) -> str:
    """Returns one line per rank."""
    return "\n".join(
        f"{activity.label}: {'device at ' if activity.reached else ''}`{activity.phase}` for {activity.idle_s:.0f} s"
        + (f", in {activity.inside}" if activity.inside else "")
        + (", silent" if activity.silent else "")
        for activity in activities
    )


def _chain(start: int, waits: Sequence[_Wait | None], activities: Sequence[RankActivity]) -> list[int]:
    """Returns the ranks from one to the rank for which it waits in the end; repeats none."""
    chain = [start]
    while (wait := waits[chain[-1]]) is not None:
        further = [rank for rank in wait.ranks if rank not in chain]
        if not further:
            break
        ends = [activities[rank] for rank in further]
        chain.append(max(ends, key=lambda one: (one.silent, waits[one.rank] is None, one.idle_s)).rank)
    return chain


def _wait_of(one: RankActivity, everyone: Sequence[RankActivity], rank_of_stage: Sequence[int]) -> _Wait | None:
    """Returns what a rank waits for; None when it waits for no rank, or that is unknown."""
    if one.silent:
        return None
    work = _WORK.fullmatch(one.phase)
    if work is not None and work[4]:
        return _message_wait(one, work, everyone, rank_of_stage)
    inner = _inner(one)
    if inner == "sends":
        # A rank that has taken everything has finished the step's work and waits for others itself.
        neighbours = [other for other in everyone if _same_column(one, other) and _other_stage(one, other)]
        return _wait_for("its last messages to be taken by", [other for other in neighbours if _is_busy(other)])
    if _collective(one):
        awaited = [other for other in everyone if other.rank != one.rank]
        if inner == "sums":
            awaited = [other for other in awaited if not _other_stage(one, other)]
        elif inner == "tensor sum":
            awaited = [o for o in awaited if replace(o.coordinates, tp=0) == replace(one.coordinates, tp=0)]
        elif one.phase.startswith("step replica "):
            awaited = [o for o in awaited if o.coordinates.dp_replicate == one.coordinates.dp_replicate]
        late = [other for other in awaited if other.silent or _inner(other) != inner]
        return _wait_for(f"{_COLLECTIVE_NAMES[inner]} with", late)
    if one.reached:
        return _stage_wait(one, everyone)
    return _group_wait(one, everyone) if one.inside else None


def _wait_for(words: str, ranks: Sequence[RankActivity]) -> _Wait | None:
    return _Wait(words, tuple(one.rank for one in ranks)) if ranks else None


def _message_wait(
    one: RankActivity, work: re.Match[str], everyone: Sequence[RankActivity], rank_of_stage: Sequence[int]
) -> _Wait | None:
    stage, kind, microbatch = int(work[1]), work[2], work[3]
    source = stage - 1 if kind == "F" else stage + 1
    if not 0 <= source < len(rank_of_stage):
        return None
    senders = [
        other
        for other in everyone
        if _same_column(one, other) and other.coordinates.pp == rank_of_stage[source] and other.rank != one.rank
    ]
    return _wait_for(f"{_KINDS[kind]} {microbatch} from stage {source} on", senders)


def _group_wait(one: RankActivity, everyone: Sequence[RankActivity]) -> _Wait | None:
    """Returns the ranks missing in a collective of a stage, or of all while the attempt starts."""
    whole_world = _WORK.fullmatch(one.phase) is None
    late = [
        other
        for other in everyone
        if other.rank != one.rank
        and (whole_world or other.coordinates.pp == one.coordinates.pp)
        and (other.silent or other.inside != one.inside)
    ]
    return _wait_for(f"{one.inside} with", late)


def _stage_wait(one: RankActivity, everyone: Sequence[RankActivity]) -> _Wait | None:
    """Returns the ranks of a device's stage that have not come to its action, which may contain
    collectives of the stage; those that are at the same one if none is behind."""
    mates = [other for other in everyone if other.rank != one.rank and not _other_stage(one, other)]
    behind = [other for other in mates if other.silent or _is_behind(other, one)]
    level = [other for other in mates if other.reached == one.reached]
    return _wait_for(f"`{one.phase}` with", behind or level)


def _is_busy(one: RankActivity) -> bool:
    """Returns whether a rank may still have to take messages of the step."""
    moves = one.reached and not _collective(one) and not one.phase.endswith(" sends")
    return one.silent or bool(moves) or _WORK.fullmatch(one.phase) is not None


def _is_behind(other: RankActivity, one: RankActivity) -> bool:
    """Returns whether a rank of the same stage has not come as far as the device of another."""
    if other.reached:
        return other.reached < one.reached
    return _WORK.fullmatch(other.phase) is not None  # its device waits for its host


def _inner(one: RankActivity) -> str:
    """Returns what a rank does in a step, by its mark; "" if it is in none."""
    words = one.phase.split()
    return " ".join(word for word in words[1:] if word != "replica") if words[:1] == ["step"] else ""


def _collective(one: RankActivity) -> str:
    """Returns the collective of all ranks, or of a stage, that a rank's mark names; "" if none."""
    return _COLLECTIVE_NAMES.get(_inner(one), "")


def _same_column(one: RankActivity, other: RankActivity) -> bool:
    return one.coordinates.column == other.coordinates.column


def _other_stage(one: RankActivity, other: RankActivity) -> bool:
    return other.rank != one.rank and other.coordinates.pp != one.coordinates.pp


# Messages -----------------------------------------------------------------------------------------


def _chain_text(chain: Sequence[int], waits: Sequence[_Wait | None], activities: Sequence[RankActivity]) -> str:
    culprit = activities[chain[-1]]
    if len(chain) == 1:
        return f"{_place(culprit)} {_ends_with(culprit)}"
    shown = chain if len(chain) <= _LONGEST_CHAIN else [*chain[:1], *chain[1 - _LONGEST_CHAIN :]]
    parts = []
    for position, (rank, awaited) in enumerate(pairwise(shown)):
        wait = waits[rank]
        assert wait is not None
        who = _place(activities[rank]) if position == 0 else "which"
        between = "" if awaited in wait.ranks else " (and so on)"
        parts.append(f"{who} waits for {wait.words} {_place(activities[awaited])}{between}")
    return f"{', '.join(parts)}, which {_ends_with(culprit)}"


def _ring_text(ring: Sequence[int], waits: Sequence[_Wait | None], activities: Sequence[RankActivity]) -> str:
    links = []
    for rank, awaited in zip(ring, [*ring[1:], ring[0]], strict=True):
        wait = waits[rank]
        assert wait is not None
        links.append(f"{_place(activities[rank])} waits for {wait.words} {activities[awaited].label}")
    longest = max(activities[rank].idle_s for rank in ring)
    text = f"ranks have waited for each other for {longest:.0f} s: {'; '.join(links[:_LONGEST_CHAIN])}"
    cable = any(activities[rank].reached for rank in ring) and len({activities[rank].node for rank in ring}) > 1
    return f"{text}; the link between them may carry nothing" if cable else text


def _place(activity: RankActivity) -> str:
    where = [f"rank {activity.rank}", *([f"node {activity.node}"] if activity.node else ())]
    return f"{activity.label} ({', '.join([*where, *([f'pid {activity.pid}'] if activity.pid else ())])})"


def _ends_with(activity: RankActivity) -> str:
    since = f"for {activity.idle_s:.0f} s"
    last = f"`{activity.phase}`"
    if activity.silent:
        return f"has not reported {since}: the rank is frozen, or its host or network is (last: {last})"
    work = _WORK.fullmatch(activity.phase)
    if activity.inside:
        return f"has been in {activity.inside} {since} ({last})"
    if work is not None and not work[4]:
        return f"has been computing {_KINDS[work[2]]} {work[3]} of stage {work[1]} {since} ({last})"
    words = activity.phase.split()
    if words[-1:] == ["read"]:
        return f"has been waiting for its data {since} ({last})"
    if words[:1] in (["save"], ["load"], ["finish"]):
        return f"has been waiting for the store {since} ({last})"
    return f"has been in {last} {since}"


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
    waiting = [rank for entries in ranks.values() for rank, entry in entries.items() if _state(entry) != "completed"]
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
