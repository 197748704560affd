"""What a save costs, beside what others' do: `python -m benchmarks.saves`.

One real S3 server on loopback, two ranks as processes, all writers in every round in turn, medians over the rounds: the
stop per save, the upload beside raw boto3 and beside DCP's writers, what a load onto other meshes reads, and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.foreign_writers import python_with_writers
from benchmarks.recut_bytes import recut_table
from benchmarks.surroundings import describe, free_port
from raypp.storage.seaweed import SeaweedServer

WORLD = 2
OWN = ("raypp", "boto3_parts")
FOREIGN = ("s3torchconnector", "fsspec")


class Ranks:
    """The processes of one writer, which wait until they are told to save."""

    def __init__(self, python: str, writer: str, world: int, megabytes: int, environment: dict[str, str]) -> None:
        port = free_port()
        self.processes = [
            subprocess.Popen(
                [python, "-m", "benchmarks.save_rank", writer, str(rank), str(world), str(port), str(megabytes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, stderr=subprocess.DEVNULL,
            )
            for rank in range(world)
        ]  # fmt: skip
        self._answers(writer)

    def save(self, number: int) -> list[dict[str, Any]]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
        return self._answers("save")

    def _answers(self, what: str) -> list[dict[str, Any]]:
        lines = [process.stdout.readline() for process in self.processes]  # type: ignore[union-attr]
        if not all(lines):
            raise RuntimeError(f"{what}: a rank ended")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()  # type: ignore[union-attr]
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def uploads(rounds: int, megabytes: int, environment: dict[str, str], server: SeaweedServer) -> list[str]:
    python, said = python_with_writers()
    pythons = dict.fromkeys(OWN, sys.executable) | (dict.fromkeys(FOREIGN, str(python)) if python else {})
    teams: dict[str, Ranks] = {}
    lines = [f"(other writers: {said})", ""]
    seconds: dict[str, list[float]] = {}
    rates: list[float] = []
    extra: list[float] = []
    try:
        for writer, interpreter in pythons.items():
            try:
                teams[writer] = Ranks(interpreter, writer, WORLD, megabytes, environment)
            except RuntimeError as error:
                lines.append(f"{writer}: skipped, {error}")
        for number in range(rounds + 1):
            for writer in (list(teams)[number % len(teams) :] + list(teams))[: len(teams)]:
                answers = teams[writer].save(number + 1)
                if number:  # the first one takes memory, opens connections, grows the server's volumes
                    seconds.setdefault(writer, []).append(max(answer["seconds"] for answer in answers))
                if writer == "raypp":
                    extra.append(max(answer["extra"] for answer in answers))
                    state = sum(answer["state"] for answer in answers)
                    rates += [fact["upload_s"] for fact in answers[0]["facts"]][: bool(number)]
            clear(server)
    finally:
        for team in teams.values():
            team.end()
    seconds["raypp, upload only"] = rates
    raw, whole = seconds["boto3_parts"], seconds["raypp"]
    lines += [
        "| writer | s, median | MB/s | raypp's save ÷ it, in speed | raypp's upload ÷ it |",
        "|---|---|---|---|---|",
    ]
    for writer, found in seconds.items():
        saves = statistics.median(a / b for a, b in zip(found, whole, strict=True))
        sends = statistics.median(a / b for a, b in zip(found, rates, strict=True))
        middle = statistics.median(found)
        lines.append(f"| {writer} | {middle:.2f} | {state / 1e6 / middle:.0f} | {saves:.2f} | {sends:.2f} |")
    share = statistics.median(a / b for a, b in zip(raw, rates, strict=True))
    lines += [
        "",
        f"upload ÷ raw boto3: {share:.2f} (goal ≥ 0.90) · peak extra host memory ÷ state: first save {extra[0]:.2f}, "
        f"most {max(extra):.2f} (goal ≤ 1.10; later saves use the first one's buffer again)",
    ]
    return lines


def clear(server: SeaweedServer) -> None:
    for folder in ("raw", "s3tc", "fsspec"):
        store = server.store("bench", folder)
        store.delete([info.key for info in store.list("")])


def stalls(rounds: int, megabytes: int, environment: dict[str, str]) -> list[str]:
    lines = [
        "| ranks | MB per rank | step, s | stop per save, ms, median (longest) | of it before the next step "
        "| stop ÷ step | of training, saved every 100 steps | step beside a save ÷ step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for world in (1, 2):
        team = Ranks(sys.executable, "training", world, megabytes // world, environment)
        try:
            found = [max(team.save(number), key=lambda a: a["stall"]) for number in range(1, rounds + 2)][1:]
        finally:
            team.end()
        stall, step = (statistics.median(a[key] for a in found) for key in ("stall", "plain"))
        begin, longest = statistics.median(a["begin"] for a in found), max(a["stall"] for a in found)
        beside = statistics.median(a["beside"] / a["plain"] for a in found)
        lines.append(
            f"| {world} | {megabytes // world} | {step:.2f} | {stall * 1e3:.1f} ({longest * 1e3:.1f}) "
            f"| {begin * 1e3:.1f} | {stall / step:.2%} | {stall / step / 100:.4%} | {beside:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of uploads")
    parser.add_argument("--megabytes", type=int, default=200, help="per rank, uploads")
    parser.add_argument("--state", type=int, default=1000, help="MB of all ranks, stops")
    parser.add_argument("--saves", type=int, default=3, help="measured saves, stops")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = SeaweedServer.start(Path(folder), buckets=("bench",))
        try:
            environment = {
                **os.environ, **server.environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "PYTHONPATH": str(Path.cwd()),
            }  # fmt: skip
            os.environ.update(server.environment())
            print(describe(), "\n")
            for title, lines in (
                ("Stop per save", lambda: stalls(options.saves, options.state, environment)),
                ("Uploads", lambda: uploads(options.rounds, options.megabytes, environment, server)),
                ("Bytes of a load", lambda: recut_table(f"{folder}/recut")),
            ):
                print(f"### {title}\n\n" + "\n".join(lines()), "\n", flush=True)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
