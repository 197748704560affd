"""What an order among the messages that leave a card would bring, simulated, as Markdown tables.

`link_hiding --hosts 4 --on-paper` prints them. One host per stage with a card each, 1F1B, 16
microbatches. Orders: equal shares, as TCP gives them; gradients before activations, or the
message that is needed first before others, where others get what the first one cannot use, as from
a card that knows priorities; and one message at a time, the one needed first, as a program can
enforce it by holding back the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.link_bounds import stage_times
from benchmarks.paced import HEAD
from raypp.schedules.one_f_one_b import build
from raypp.schedules.shared_cards import Channel, SharedCards, Step
from raypp.schedules.simulate import Simulator, StageTimes

DEPTHS, LINKS, MICROBATCHES = range(5), (1.0, 1.5, 2.0), 16


class Ordered(SharedCards):
    """Serves messages by priority.

    Args:
        lines: As for `SharedCards`.
        channels: As for `SharedCards`.
        cards: As for `SharedCards`.
        key: Gets a channel and a result's number; the smallest key goes first.
        alone: Whether a card sends one message at a time, even if a share of its rate stays unused.
    """

    def __init__(
        self,
        lines: Sequence[Sequence[Step]],
        channels: Sequence[Channel],
        cards: Sequence[int],
        key: Callable[[int, int], float],
        *,
        alone: bool,
    ) -> None:
        super().__init__(lines, channels, cards)
        self._key, self._alone = key, alone

    def _share(self, channel: int, now: float) -> None:
        waiting = [(index, crossing) for index, crossing in enumerate(self._crossing) if crossing is not None]
        waiting.sort(key=lambda one: (self._key(one[0], one[1].result), one[1].result))
        left: dict[tuple[str, int], float] = {}
        if self._alone:
            first = {self._used[index][0]: index for index, _ in reversed(waiting)}
            sends = set(first.values())
            load = [self._used[index][-1] for index in sends]
            rates = {index: (1 / load.count(self._used[index][-1]) if index in sends else 0.0) for index, _ in waiting}
        else:
            rates = {}
            for index, _ in waiting:
                rates[index] = min(left.get(card, 1.0) for card in self._used[index])
                left |= {card: left.get(card, 1.0) - rates[index] for card in self._used[index]}
        for index, crossing in waiting:
            self._set_rate(index, crossing, rates[index], now)


def seconds(simulator: Simulator, times: StageTimes, order: str) -> float:
    """Returns the time of a step with one of the `ORDERS`."""
    lines, channels = simulator.steps(times)
    cards = list(range(len(lines)))
    fair = SharedCards(lines, channels, cards)
    fair.run()
    needed = {
        step.needs: slot[0]
        for line, slots in zip(lines, fair.slots, strict=True)
        for step, slot in zip(line, slots, strict=True)
        if step.needs
    }
    keys: dict[str, Callable[[int, int], float]] = {
        "gradients first": lambda channel, result: 0.0 if channels[channel][0] > channels[channel][1] else 1.0,
        "needed first": lambda channel, result: needed[result],
        "one at a time": lambda channel, result: needed[result],
    }
    run = fair if order not in keys else Ordered(lines, channels, cards, keys[order], alone=order == "one at a time")
    if run is not fair:
        run.run()
    return max(slots[-1][1] for slots in run.slots)


ORDERS = ("equal shares", "gradients first", "needed first", "one at a time")


def print_orders(layers: Sequence[int]) -> None:
    """Prints the tables for stages that are alike, and for this cut with a head."""
    for head, name in ((0.0, "equal stages"), (HEAD, f"layers {layers}, a head of {HEAD} layers")):
        times, pp = stage_times(layers, head), len(layers)
        free = Simulator(build(pp, 1, MICROBATCHES)).run(times).makespan
        print(f"\nOrders, {name}: share of a free link's speed, by lookahead {DEPTHS[0]} / … / {DEPTHS[-1]}\n")
        print(f"| order | {' | '.join(f'message {link}' for link in LINKS)} |")
        print("|---|" + "---|" * len(LINKS))
        for order in ORDERS:
            cells = []
            for link in LINKS:
                here = replace(times, link=link)
                steps = [seconds(Simulator(build(pp, 1, MICROBATCHES, depth)), here, order) for depth in DEPTHS]
                cells.append(" / ".join(f"{free / step:.2f}" for step in steps))
            print(f"| {order} | {' | '.join(cells)} |")
