"""What a slow cable costs, and what raypp hides of it: `python -m benchmarks.link_hiding`. Needs root; about 7 minutes.

Two hosts (network namespaces) with one core each, joined by a cable whose rate is set so that a message takes 0.5, 1.0
and 1.5 times a forward: real compute, real packets. On each cable, one after another in the same run: raypp with
`lookahead: auto`, raypp with the classic warm-up, raypp with int8 messages, torch's own Schedule1F1B (a bare script of
the same model and cut), and the same job with its weights sharded over both hosts instead (FSDP only). Before and after
them raypp on a cable without a limit, which everything is divided by.

The table for four ranks is the simulator's; beside it stands how near it comes to what was measured with two.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sizes import ROWS, SEQ_LEN, model_options
from benchmarks.surroundings import describe
from benchmarks.torch_1f1b_on_paper import torch_1f1b_s
from cluster.testbed import Network, why_not
from raypp.schedules.one_f_one_b import build
from raypp.schedules.simulate import StageTimes, simulate

MICROBATCHES, CUT = 16, "5,3"
GOALS = {0.5: (0.92, 1.3), 1.0: (0.88, 1.45), 1.5: (0.84, 1.7)}
"""By message ÷ forward: of an unlimited cable at least, and of torch's Schedule1F1B on the same cable at least."""
UNTIL_CHOSEN = 4
"""raypp times steps 2 and 3 and has its depth from step 4 on."""

AUTO = "raypp, lookahead auto"
RAYPP = ["benchmarks.timed_rank", "--cut", CUT]
VARIANTS: dict[str, tuple[list[str], int]] = {
    AUTO: (RAYPP, UNTIL_CHOSEN),
    "raypp, lookahead 0": ([*RAYPP, "--set", "pipeline.lookahead=0"], 1),
    "raypp, lookahead 1": ([*RAYPP, "--set", "pipeline.lookahead=1"], 1),
    "raypp, auto, int8": ([*RAYPP, "--set", "pipeline.wire={compression: int8}"], UNTIL_CHOSEN),
    "torch Schedule1F1B": (["benchmarks.bare_1f1b", "--cut", CUT], 1),
    "FSDP only": (["benchmarks.timed_rank", "--set", "mesh.pp=1", "--set", "mesh.fsdp=2"], 1),
}
"""What is run, and how many steps of it are not counted."""


def count_of(variant: str, microbatches: int) -> list[str]:
    """Arguments for the number of microbatches, of which FSDP's two replicas share out those of the pipeline."""
    if variant == "torch Schedule1F1B":
        return ["--microbatches", str(microbatches)]
    return ["--set", f"pipeline.microbatches={microbatches // 2 if variant == 'FSDP only' else microbatches}"]


class Hosts:
    """Two hosts, and programs on them: rank r on host r, on core r."""

    def __init__(self, network: Network, microbatches: int) -> None:
        self.network, self.microbatches, self._port = network, microbatches, 29700

    def run(self, variant: str, steps: int) -> list[dict[str, Any]]:
        """What both ranks measured; `steps` are counted."""
        (module, *arguments), extra = VARIANTS[variant]
        arguments += count_of(variant, self.microbatches)
        self._port += 1
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                subprocess.Popen(
                    self.network.command(host, ["taskset", "-c", str(host % (os.cpu_count() or 1)), sys.executable,
                                                "-m", module, *arguments, "--steps", str(steps + extra)]),
                    env=self._environment(host, folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                )
                for host in range(2)
            ]  # fmt: skip
            for host, rank in enumerate(ranks):
                _, errors = rank.communicate(timeout=900)
                if rank.returncode:
                    raise SystemExit(f"{variant}, rank {host}:\n{errors.decode()[-3000:]}")
            return [json.loads(Path(f"{folder}/out.{host}").read_text()) for host in range(2)]

    def _environment(self, host: int, folder: str) -> dict[str, str]:
        return {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "RANK": str(host), "WORLD_SIZE": "2",
            "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": self.network.address(0),
            "MASTER_PORT": str(self._port), "BENCH_OUT": f"{folder}/out", "BENCH_STORE": f"{folder}/store",
        }  # fmt: skip


def step_seconds(variant: str, ranks: Sequence[dict[str, Any]]) -> float:
    """Median seconds of a step that counts."""
    return statistics.median(ranks[0]["wall"][VARIANTS[variant][1] :])


def told(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The event with which raypp says what it chose, and why."""
    return next(event for event in ranks[0]["events"] if event["kind"] == "lookahead")


def message_bits() -> int:
    return ROWS * SEQ_LEN * model_options().hidden_size * 4 * 8


def measure(hosts: Hosts, steps: int, only: Sequence[str], shares: Sequence[float]) -> dict[str, Any]:
    """All variants on all cables."""
    unlimited = [hosts.run(AUTO, steps)]
    times = told(unlimited[0])["details"]
    forward = statistics.mean(times["forward_s"])
    found: dict[str, Any] = {"times": times, "forward_s": forward, "microbatches": hosts.microbatches, "cables": {}}
    print(f"no limit: {step_seconds(AUTO, unlimited[0]):.3f} s; {told(unlimited[0])['message']}")
    for share in shares:
        rate = message_bits() / (share * forward)
        for host in range(2):
            hosts.network.set_rate(host, f"{rate / 1e6:.3f}mbit")
        cable: dict[str, Any] = {"mbit": rate / 1e6, "steps": {}, "bytes": {}}
        for variant in only or VARIANTS:
            ranks = hosts.run(variant, steps)
            cable["steps"][variant] = step_seconds(variant, ranks)
            cable["bytes"][variant] = ranks[0].get("bytes", [0])[-1]
            if variant == AUTO:
                cable["told"] = told(ranks)
            seconds = cable["steps"][variant]
            print(f"{share} of a forward, {rate / 1e6:.1f} Mbit/s: {variant} {seconds:.3f} s", flush=True)
        found["cables"][share] = cable
    for host in range(2):
        hosts.network.set_rate(host, "none")
    unlimited.append(hosts.run(AUTO, steps))
    found["torch unlimited"] = step_seconds("torch Schedule1F1B", hosts.run("torch Schedule1F1B", steps))
    found["unlimited"] = [step_seconds(AUTO, ranks) for ranks in unlimited]
    return found


def report(found: dict[str, Any]) -> None:
    """Tables of seconds and ratios, with the goals, and the simulator's for four ranks."""
    base = statistics.mean(found["unlimited"])
    print(f"\n{describe()}")
    print(f"\nP = 2, m = {found['microbatches']}, fp32, one core each; a message {message_bits() / 8 / 1024:.0f} KiB; "
          f"a forward of {found['forward_s'] * 1e3:.1f} ms (mean of the stages)")  # fmt: skip
    print(f"No limit: raypp {base:.3f} s (before and after: {' '.join(f'{s:.3f}' for s in found['unlimited'])}), "
          f"torch {found['torch unlimited']:.3f} s")  # fmt: skip
    print("\n| message ÷ forward | cable | variant | s per step | no limit ÷ it (goal) | torch ÷ it (goal) | MB sent |")
    print("|---|---|---|---|---|---|---|")
    for share, cable in found["cables"].items():
        torch_s = cable["steps"].get("torch Schedule1F1B")
        for variant, seconds in cable["steps"].items():
            goal = [f" (≥ {value})" for value in GOALS.get(float(share), ())] if variant == AUTO else []
            goal = goal or ["", ""]
            against = f"{torch_s / seconds:.2f}{goal[1]}" if torch_s else ""
            print(f"| {share} | {cable['mbit']:.0f} Mbit/s | {variant} | {seconds:.3f} | {base / seconds:.2f}{goal[0]} "
                  f"| {against} | {cable['bytes'][variant] / 1e6:.1f} |")  # fmt: skip
    for share, cable in found["cables"].items():
        if "told" in cable:
            print(f"\n{share}: {cable['told']['message']}")
    simulated()


def simulated() -> None:
    """Four and eight ranks by the simulator: forward 1, backward 2, equal stages."""
    print("\nSimulated (forward 1, backward 2, equal stages): share of a free link's speed")
    print("\n| P | m | message ÷ forward | raypp, best lookahead | lookahead | torch Schedule1F1B | ratio |")
    print("|---|---|---|---|---|---|---|")
    for pp, microbatches in ((2, 16), (4, 32), (8, 64)):
        free = simulate(build(pp, 1, microbatches), StageTimes.equal(pp)).makespan
        for share in (0.5, 1.0, 1.5, 2.0):
            times = StageTimes.equal(pp, link=share)
            steps = [simulate(build(pp, 1, microbatches, depth), times).makespan for depth in range(5)]
            best = next(depth for depth, step in enumerate(steps) if step <= min(steps) * 1.01)
            theirs = torch_1f1b_s(pp, microbatches, 1.0, 2.0, share)
            print(f"| {pp} | {microbatches} | {share} | {free / steps[best]:.2f} | {best} | {free / theirs:.2f} "
                  f"| {theirs / steps[best]:.2f} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each run")
    parser.add_argument("--only", nargs="*", default=[], choices=list(VARIANTS), help="some of the variants")
    parser.add_argument("--shares", nargs="*", type=float, default=list(GOALS), help="message ÷ forward of the cables")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--out", type=Path, help="write what was measured as JSON")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        simulated()
        return
    begun = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the network goes, too
    network = Network.make(f"lk{os.getpid() % 100000}", 2)
    try:
        found = measure(Hosts(network, options.microbatches), options.steps, options.only, options.shares)
    finally:
        network.remove()
    report(found)
    print(f"\n{time.perf_counter() - begun:.0f} s")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
