"""The cost of a save, compared with other writers.

It uses one S3 server on loopback and runs ranks as processes, with all writers in turn in every
round. It prints medians over the rounds: what training loses; the upload and its CPU time, compared
with raw boto3 and DCP's writers; and what a load onto other meshes reads. The server is SeaweedFS,
whose CPU time bounds every writer.
"""

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.recut_bytes import recut_table
from benchmarks.save_teams import Answers, Teams
from benchmarks.save_writers import WRITERS
from benchmarks.surroundings import begin
from benchmarks.tables import head
from raypp.control.clusters.seaweed import SeaweedServer

WORLD = 2


def medians(found: list[Answers], key: str) -> float:
    """Returns the value of the slowest rank."""
    return statistics.median(max(answer[key] for answer in answers) for answers in found)


def ratios(theirs: list[float], ours: list[float]) -> float:
    """Returns the median over the rounds of theirs ÷ ours."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def in_turns(what: str, rounds: int, teams: Teams, server: SeaweedServer) -> dict[str, list[Answers]]:
    """Returns the answers of every round, for each writer that did not fail, after one additional
    round that allocates memory, opens connections and grows the server's volumes."""
    found: dict[str, list[Answers]] = {}
    for _ in range(rounds + 1):
        for name, answers in teams.round(what).items():
            found.setdefault(name, []).append(answers)
        clear(server)
    if len(found.get("raypp", ())) != rounds + 1:
        raise RuntimeError("\n".join(teams.lines))
    return {name: answers for name, answers in found.items() if len(answers) == rounds + 1}


def warm(found: dict[str, list[Answers]]) -> dict[str, list[Answers]]:
    """Drops the first round."""
    return {name: answers[1:] for name, answers in found.items()}


def clear(server: SeaweedServer) -> None:
    for folder in ("raw", "s3tc", "fsspec"):
        store = server.store("bench", folder)
        store.delete([info.key for info in store.list("")])


def uploads(teams: Teams, rounds: int, server: SeaweedServer) -> list[str]:
    """Measures saves without training: the seconds until they are durable, and the CPU time."""
    everything = in_turns("save", rounds, teams, server)
    found = warm(everything)
    seconds = {name: [max(a["seconds"] for a in one) for one in answers] for name, answers in found.items()}
    whole, alone = seconds["raypp"], [one[0]["facts"][0]["upload_s"] for one in found["raypp"]]
    gigabytes = sum(answer["state"] for answer in found["raypp"][0]) / 1e9
    client = {name: [sum(a["cpu"] for a in one) / gigabytes for one in answers] for name, answers in found.items()}
    lines = [
        head(
            "writer | s, median | MB/s | CPU s per GB: ranks | server | cores busy | raypp's save ÷ it, in speed"
            " | raypp's upload ÷ it | its CPU ÷ raypp's"
        )
    ]
    for name, answers in found.items():
        server_s = statistics.median(one[0]["server"] / gigabytes for one in answers)
        own_s, middle = statistics.median(client[name]), statistics.median(seconds[name])
        busy = (own_s + server_s) * gigabytes / middle
        lines.append(
            f"| {name} | {middle:.2f} | {gigabytes * 1e3 / middle:.0f} | {own_s:.2f} | {server_s:.2f} | {busy:.2f} "
            f"| {ratios(seconds[name], whole):.2f} | {ratios(seconds[name], alone):.2f} "
            f"| {ratios(client[name], client['raypp']):.2f} |"
        )
    lines += ["", *bound(found, seconds, gigabytes)]
    extra = [max(answer["extra"] for answer in one) for one in everything["raypp"]]
    rest = "the rest of its save is the copy and the commit."
    lines += ["", f"raypp's upload alone: {statistics.median(alone):.2f} s, {rest}"]
    lines.append(f"Peak extra host memory ÷ state: {max(extra):.2f} (goal ≤ 1.10).")
    if "boto3_parts" in seconds:
        lines.append(f"Upload ÷ raw boto3: {ratios(seconds['boto3_parts'], alone):.2f} (goal ≥ 0.90).")
    for name in ("s3torchconnector", "fsspec"):
        if name in seconds:
            lines.append(f"Upload ÷ DCP's {name} writer: {ratios(seconds[name], alone):.2f} (goal ≥ 1.5).")
    return lines


def bound(found: dict[str, list[Answers]], seconds: dict[str, list[float]], gigabytes: float) -> list[str]:
    """Computes the rate that the server's own CPU time allows on this machine."""
    least = min(one[0]["server"] for answers in found.values() for one in answers) / gigabytes
    cores = os.cpu_count() or 1
    lines = [
        f"The server spends at least {least:.1f} CPU s per GB with every writer: with a writer that costs nothing, "
        f"these {cores} cores could store {cores * 1e3 / least:.0f} MB/s if they did nothing else."
    ]
    for name in ("s3torchconnector", "fsspec"):
        if name in seconds:
            most = statistics.median(seconds[name]) / (gigabytes * least / cores)
            lines.append(f"So nothing here can be more than {most:.2f} × as fast as DCP's {name} writer.")
    return lines


def losses(teams: Teams, rounds: int, server: SeaweedServer) -> list[str]:
    """Measures saves during training, for writers that let it continue."""
    found = warm(in_turns("train", rounds, teams, server))
    titles = "writer | step, s | training stalls, ms, median (longest) | total cost of a save to training, s"
    lines = [head(f"{titles} | stall ÷ raypp | total ÷ raypp")]
    own = {key: [max(a[key] for a in one) for one in found["raypp"]] for key in ("stall", "lost")}
    for name, answers in found.items():
        still, lost = ([max(a[key] for a in one) for one in answers] for key in ("stall", "lost"))
        middle = statistics.median(still) * 1e3
        lines.append(
            f"| {name} | {medians(answers, 'plain'):.2f} | {middle:.0f} ({max(still) * 1e3:.0f}) "
            f"| {statistics.median(lost):.2f} | {ratios(still, own['stall']):.1f} | {ratios(lost, own['lost']):.2f} |"
        )
    return lines


def stalls(rounds: int, megabytes: int, environment: dict[str, str], server: SeaweedServer) -> list[str]:
    """Measures raypp's saves of a larger state."""
    titles = "ranks | MB per rank | step, s | stop per save, ms, median (longest) | of it before the next step"
    lines = [head(f"{titles} | stop ÷ step | of training, saved every 100 steps | step during a save ÷ step")]
    for world in (1, 2):
        teams = Teams(["raypp"], world, megabytes // world, environment, server.pid)
        try:
            found = warm(in_turns("train", rounds, teams, server))["raypp"]
        finally:
            teams.end()
        stall, step, begin = (medians(found, key) for key in ("stall", "plain", "begin"))
        longest = max(answer["stall"] for answers in found for answer in answers)
        beside = statistics.median(max(a["beside"] / a["plain"] for a in answers) for answers in found)
        lines.append(
            f"| {world} | {megabytes // world} | {step:.2f} | {stall * 1e3:.1f} ({longest * 1e3:.1f}) "
            f"| {begin * 1e3:.1f} | {stall / step:.2%} | {stall / step / 100:.4%} | {beside:.2f} |"
        )
    return lines


def beside_others(options: Any, environment: dict[str, str], server: SeaweedServer) -> list[str]:
    teams = Teams(options.writers, WORLD, options.megabytes, environment, server.pid)
    try:
        print("\n".join(uploads(teams, options.rounds, server)), "\n", flush=True)
        lines = [f"Training of {WORLD} ranks that saves, {options.megabytes} MB of state each:"]
        lines += losses(teams, options.trains, server)
        return [*lines, "", *teams.lines]
    finally:
        teams.end()


def main() -> None:
    tables = ["stops", "uploads", "loads"]
    options = begin(
        __doc__,
        rounds=(5, "of uploads"),
        trains=(2, "rounds of saves during training"),
        megabytes=(200, "per rank, uploads"),
        state=(1000, "MB of all ranks, stops"),
        saves=(3, "measured saves, stops"),
        writers=(list(WRITERS), "that are compared", WRITERS),
        only=(tables, "some of the tables", tables),
    )
    with tempfile.TemporaryDirectory() as folder:
        server = SeaweedServer.start(Path(folder), buckets=("bench",))
        try:
            environment = {
                **os.environ, **server.environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "PYTHONPATH": str(Path.cwd()),
            }  # fmt: skip
            os.environ.update(server.environment())
            for name, title, lines in (
                ("stops", "Stop per save", lambda: stalls(options.saves, options.state, environment, server)),
                ("uploads", "Compared with other writers", lambda: beside_others(options, environment, server)),
                ("loads", "Bytes of a load", lambda: recut_table(f"{folder}/recut")),
            ):
                if name in options.only:
                    print(f"### {title}", flush=True)
                    print("\n".join(lines()), "\n", flush=True)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
