"""A mixture: each row comes from one of several sources, chosen by their weights.

Each row comes from the part that has given the fewest rows for its weight (the divisor method of
Webster and Sainte-Laguë, in whole numbers). So the choice follows from the numbers of rows that the
parts have given, which are part of the position: nothing is drawn, stored or replayed. Each part
has its own random order, and packs its own rows.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, lcm
from typing import Any

from raypp.errors import DataError, Problem
from raypp.job.job import PartOptions
from raypp.kinds import SourceKind
from raypp.rank.data.corpus import Corpus, Piece, joined
from raypp.rank.data.packing import Cursor, RowOrder, RowPlan, rows_from
from raypp.rank.data.tokenised import Request

KIND = SourceKind("mixture", "several sources by weights, from data.parts", position=6, keys=("parts",), mixes=True)


def read(request: Request) -> Corpus:
    """Refuses: the sources of the parts read their documents."""
    raise DataError(Problem(request.place, "a mixture cannot be a part of a mixture", "list its parts"))


@dataclass(frozen=True, eq=False)
class Part:
    """A source of a mixture. `weight`: its share of the rows, relative to the other parts.
    `epochs`, `tokens`: its budget; None: no limit."""

    name: str
    corpus: Corpus
    digest: str
    weight: float
    epochs: float | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class PartCursor:
    """The position in a part: next row, rows and tokens given, and rows before the phase."""

    at: Cursor = field(default_factory=Cursor)
    rows: int = 0
    tokens: int = 0
    before: int = 0


MixtureCursor = tuple[PartCursor, ...]


class MixtureOrder(RowOrder):
    """The rows of a mixture. A part whose budget is spent gives no more; the others share its rows.

    A budget ends with the row in which it is reached. `plan`: returns the rows of documents in an
    order by a seed. `phases`: the first step of every phase but the first, and the parts' weights
    in it. `rows_per_step`: of all replicas."""

    def __init__(
        self,
        parts: Sequence[Part],
        corpus: Corpus,
        plan: Callable[[Corpus, int], RowPlan],
        seed: int,
        phases: Sequence[tuple[int, Sequence[float]]] = (),
        rows_per_step: int = 1,
    ) -> None:
        self.parts, self.corpus, self._plan, self._seed = tuple(parts), corpus, plan, seed
        self.start: MixtureCursor = (PartCursor(),) * len(parts)
        self._plans = [plan(part.corpus, _seed(seed, index)) for index, part in enumerate(parts)]
        self._totals = [int(part.corpus.lengths().sum()) for part in parts]
        self._limits = [
            part.tokens if part.epochs is None else ceil(Fraction(repr(part.epochs)) * total)
            for part, total in zip(parts, self._totals, strict=True)
        ]
        self._shares = {0: _shares([part.weight for part in parts])}  # by the first row of the phase
        self._shares |= {(step - 1) * rows_per_step: _shares(weights) for step, weights in phases}
        self._first_document = [0]
        for part in parts:
            self._first_document.append(self._first_document[-1] + len(part.corpus))

    def rows(self, cursor: MixtureCursor) -> Iterator[tuple[list[Piece], MixtureCursor]]:
        """Yields all rows from a position on, each with the position after it. Raises DataError:
        the budgets of all parts are spent."""
        sources = [rows_from(plan, one.at) for plan, one in zip(self._plans, cursor, strict=True)]
        given = sum(one.rows for one in cursor)
        shares = self._shares[max(first for first in self._shares if first <= given)]
        while True:
            if given in self._shares:
                shares, cursor = self._shares[given], tuple(replace(one, before=one.rows) for one in cursor)
            index = self._next(cursor, shares)
            pieces, at = next(sources[index])
            one, base, given = cursor[index], self._first_document[index], given + 1
            tokens = one.tokens + sum(piece.length for piece in pieces)
            after = replace(one, at=at, rows=one.rows + 1, tokens=tokens)
            cursor = (*cursor[:index], after, *cursor[index + 1 :])
            yield [Piece(base + piece.document, piece.start, piece.length) for piece in pieces], cursor

    def once(self) -> RowPlan:
        """Returns the plan of one epoch of all parts' documents, without weights and budgets."""
        return self._plan(self.corpus, self._seed)

    def rows_until(self, most: int) -> int:
        """Returns how many rows all budgets give together, counted to at least `most`."""
        if None in self._limits:
            return most
        total = sum(-(-(limit or 0) // plan.seq_len) for limit, plan in zip(self._limits, self._plans, strict=True))
        if total >= most:  # no row has more tokens than seq_len
            return most
        total = 0
        for limit, plan in zip(self._limits, self._plans, strict=True):
            tokens, rows = 0, rows_from(plan, Cursor())
            while tokens < (limit or 0) and total < most:
                tokens += sum(piece.length for piece in next(rows)[0])
                total += 1
        return total

    def document(self, cursor: MixtureCursor) -> dict[str, Any]:
        parts = [
            {**one.at.document(), "rows": one.rows, "tokens": one.tokens, "before": one.before, **_facts(part)}
            for part, one in zip(self.parts, cursor, strict=True)
        ]
        return {"epoch": 0, "block": 0, "row": sum(one.rows for one in cursor), "parts": parts}

    def cursor(self, document: Mapping[str, Any]) -> MixtureCursor:
        cursors = tuple(
            PartCursor(Cursor.of(one), int(one["rows"]), int(one["tokens"]), int(one.get("before", 0)))
            for one in document["parts"]
        )
        if len(cursors) != len(self.parts):
            raise ValueError("another number of parts")
        return cursors

    def differences(self, document: Mapping[str, Any]) -> list[str]:
        saved = document.get("parts") or ()
        if len(saved) != len(self.parts):
            return [f"{len(saved)} parts, now {len(self.parts)}" if saved else "a single source, now a mixture"]
        changes = []
        for index, (part, before) in enumerate(zip(self.parts, saved, strict=True)):
            now = _facts(part)
            place = f"data.parts[{index}] ({part.name})"
            if before.get("digest") != now["digest"]:
                changes.append(f"{place}: other documents")
            words = ("weight", "epochs", "tokens budget")
            for word, key in zip(words, ("weight", "most_epochs", "most_tokens"), strict=True):
                if before.get(key) != now[key]:
                    changes.append(f"{place}: {word} {_word(before.get(key))}, now {_word(now[key])}")
        return changes

    def used(self, cursor: MixtureCursor) -> dict[str, float]:
        figures: dict[str, float] = {}
        for part, one, total in zip(self.parts, cursor, self._totals, strict=True):
            key = f"data.{part.name}"
            figures |= {f"{key}.tokens": one.tokens, f"{key}.rows": one.rows, f"{key}.epochs": one.tokens / total}
        return figures

    def _next(self, cursor: MixtureCursor, shares: Sequence[int]) -> int:
        """Returns the part of the next row: of those left, the least (2·rows + 1) / weight, of the
        rows of this phase."""
        chosen, halves = -1, [2 * (one.rows - one.before) + 1 for one in cursor]
        for index, (one, limit) in enumerate(zip(cursor, self._limits, strict=True)):
            if not shares[index] or (limit is not None and one.tokens >= limit):
                continue
            if chosen < 0 or halves[index] * shares[chosen] < halves[chosen] * shares[index]:
                chosen = index
        if chosen < 0:
            rows = sum(one.rows for one in cursor)
            fault = f"the budgets of all parts are spent after {rows:,} rows"
            raise DataError(Problem("data.parts", fault, "raise a budget, or leave one part without any"))
        return chosen


def part_names(parts: Sequence[PartOptions]) -> list[str]:
    """Returns a name for every part, none twice: its own, else from the path or the kind."""
    taken, names = {part.name for part in parts}, []
    for part in parts:
        if (name := part.name) is None:
            stem = (part.path or part.kind).rstrip("/").rpartition("/")[2].partition(".")[0].lower()
            stem = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in stem)[:30].strip("-")
            count, name = 1, stem or "part"
            while name in taken:
                count += 1
                name = f"{stem or 'part'}-{count}"
            taken.add(name)
        names.append(name)
    return names


def training_corpus(parts: Sequence[Part]) -> Corpus:
    """Returns the documents of all parts, in order. Their digest covers weights and budgets."""
    facts = repr([sorted(_facts(part).items()) for part in parts])
    return replace(joined([part.corpus for part in parts]), digest=hashlib.sha256(facts.encode()).hexdigest()[:16])


def _facts(part: Part) -> dict[str, Any]:
    return {
        "digest": part.digest,
        "weight": float(part.weight),
        "most_epochs": None if part.epochs is None else float(part.epochs),
        "most_tokens": part.tokens,
    }


def _word(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _shares(weights: Sequence[float]) -> list[int]:
    """Returns weights as whole numbers of the same proportions."""
    shares = [Fraction(repr(weight)) for weight in weights]
    return [int(share * lcm(*(one.denominator for one in shares))) for share in shares]


def _seed(seed: int, index: int) -> int:
    """Returns the seed of a part's order, so that a part that is listed twice has two orders."""
    return int.from_bytes(hashlib.sha256(f"{seed} part {index}".encode()).digest()[:7], "big")
