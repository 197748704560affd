"""Devices held ready beside a run's own, for the day one of its nodes is lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from raypp.control.ray_nodes import existing_group, make_group

_LOOK_EVERY_S = 1.0
_PATIENCE_S = 5.0


@dataclass
class Spares:
    """A placement group beside the run's. It never holds up anything: without room for it the run goes on without.

    Asked for on nodes the run does not use, whose loss it is there for; where those have no room, anywhere.

    Args:
        name: Of the group.
        count: Bundles, one per rank that can be replaced.
        bundle: What each holds.
    """

    name: str
    count: int
    bundle: dict[str, float]
    group: PlacementGroup | None = None
    _elsewhere: bool = False
    _asked_at: float = 0.0
    _looked_at: float = 0.0
    _held: bool = False
    _missed: bool = False
    _news: list[tuple[str, str]] = field(default_factory=list)

    def take_over(self) -> None:
        """Goes on with the group that an earlier life of the controller made."""
        self.group = existing_group(self.name) if self.count else None
        self._held = self.group is not None

    def hold(self, used: Collection[str], left_out: Collection[str] = ()) -> None:
        """Asks for them, unless they are held or asked for already, and notes what has become of that.

        Args:
            used: Nodes of the run, by id.
            left_out: Nodes that are not to be used at all.
        """
        now = time.monotonic()
        if not self.count or now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        if self.group is None:
            self._ask({*used, *left_out}, elsewhere=True)
            return
        placed = dict(placement_group_table(self.group)).get("state") == "CREATED"
        what = f"{self.count} spare{'s' if self.count > 1 else ''}"
        if placed and not self._held:
            self._news.append(("spares_held", f"{what} held ready"))
            self._missed = False
        elif not placed and self._held:
            self._asked_at = now  # their node was lost; Ray looks for another
        elif not placed and now - self._asked_at > _PATIENCE_S:
            if self._elsewhere:
                self.release()
                self._ask(left_out, elsewhere=False)
            elif not self._missed:
                self._missed = True
                self._news.append(("spares_missing", f"no room for {what}; the run goes on without until there is"))
        self._held = placed

    def told(self) -> list[tuple[str, str]]:
        """What has happened to them since it was last asked: the kind of an event, and words."""
        told, self._news = self._news, []
        return told

    def where(self) -> Counter[str]:
        """How many are held on each node."""
        table = dict(placement_group_table(self.group)) if self.group is not None else {}
        return Counter(map(str, table["bundles_to_node_id"].values())) if table.get("state") == "CREATED" else Counter()

    def release(self, why: str = "") -> None:
        """Gives them back.

        Args:
            why: To be told, when there were any.
        """
        if self.group is None:
            return
        remove_placement_group(self.group)
        if why and self._held:
            self._news.append(("spares_released", f"{self.count} held ready: {why}"))
        self.group, self._held = None, False

    def _ask(self, avoided: Collection[str], elsewhere: bool) -> None:
        self.group = make_group(self.name, self.count, self.bundle, avoided)
        self._elsewhere, self._asked_at, self._held = elsewhere, time.monotonic(), False
