"""The command: `python -m tests.fuzz [TARGET…] --minutes 10 --seed 1`, and `--replay FILE`."""

import sys
import time
from pathlib import Path

import click

from tests.fuzz import Target, all_targets
from tests.fuzz.runner import Tally, execute, input_of, take_turn

_TURN_S = 10.0


@click.command()
@click.argument("names", nargs=-1)
@click.option("--minutes", default=1.0, show_default=True, help="For all targets together.")
@click.option("--seed", default=0, show_default=True, help="0: a new one, which is printed.")
@click.option("--out", default=Path("build/fuzz"), show_default=True, type=click.Path(path_type=Path),
              help="Folder for the input of a failure.")  # fmt: skip
@click.option("--replay", type=click.Path(path_type=Path, exists=True), help="Give a saved input to its target.")
def main(names: tuple[str, ...], minutes: float, seed: int, out: Path, replay: Path | None) -> None:
    """Fuzzes the targets whose names begin with one of NAMES; without NAMES, all.

    Stops at the first failure.
    """
    targets = all_targets()
    if replay is not None:
        _replay(targets, replay)
    chosen = [one for one in targets if one.name.startswith(names or "")]
    if not chosen:
        raise click.UsageError(f"no such target; there are {', '.join(one.name for one in targets)}")
    seed = seed or int(time.time())
    print(f"{len(chosen)} targets for {minutes:g} min, seed {seed}", flush=True)
    tallies = {one.name: Tally() for one in chosen}
    failed = _take_turns(chosen, tallies, minutes * 60, seed)
    for name, tally in tallies.items():
        if tally.executions:
            print(_line(name, tally))
    if failed is None:
        return
    tally = tallies[failed.name]
    data = input_of(failed, seed, tally.failed)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{failed.name}-{seed}-{tally.failed}"
    path.write_bytes(data)
    print(f"\n{failed.name} failed: {tally.failure}\n\nThe input ({len(data):,} bytes) is {path}. Again:")
    print(f"  python -m tests.fuzz --replay {path}")
    sys.exit(1)


def _take_turns(targets: list[Target], tallies: dict[str, Tally], seconds: float, seed: int) -> Target | None:
    """Returns the target that failed, or None."""
    until = time.monotonic() + seconds
    turn_s = min(_TURN_S, seconds / len(targets))
    while True:
        for target in targets:
            tallies[target.name] = take_turn(target, seed, tallies[target.name], turn_s)
            if tallies[target.name].failure is not None:
                return target
        if time.monotonic() + turn_s * len(targets) / 2 > until:
            return None


def _line(name: str, tally: Tally) -> str:
    return (
        f"{name:40} {tally.executions:9,} executions {tally.executions / max(tally.seconds, 1e-9):8,.0f}/s"
        f" {tally.refused / tally.executions:4.0%} refused, slowest {tally.slowest_cpu_s:.2f} s of CPU,"
        f" most {tally.most_mb:.0f} MB"
    )


def _replay(targets: list[Target], path: Path) -> None:
    target = next((one for one in targets if path.name.startswith(f"{one.name}-")), None)
    if target is None:
        raise click.UsageError(f"{path.name} begins with no target's name")
    one = execute(target, path.read_bytes())
    print(one.failure or (f"refused: {one.refused}" if one.refused else "accepted"))
    print(f"{one.cpu_s:.2f} s of CPU, {one.memory_mb:.0f} MB")
    sys.exit(1 if one.failure else 0)


if __name__ == "__main__":
    main()
