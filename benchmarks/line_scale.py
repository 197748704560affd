"""What the leader of a cluster's line costs while runs wait.

It starts its own Ray with the real leader (`raypp.control.queue.leader`), tickets of runs of
different sizes that wait, and eight runs that hold all devices: placement groups, and actors in
place of their controllers, which say that the runs take another day. So in each turn the leader
asks whether one may go past the head. The first row is an actor that does nothing: what Ray itself
takes.
"""

import time
from typing import Any

import ray
from ray.util.placement_group import placement_group

from benchmarks.surroundings import begin
from benchmarks.tables import head
from raypp.control.protocol import NAMESPACE
from raypp.control.queue import cluster_view
from raypp.control.queue.leader import LineLeader
from raypp.control.queue.line import Need
from raypp.control.queue.ticket import Ticket
from raypp.control.ray_state import group_name

RUNNING = 8


class Idle:
    def look(self) -> bool:
        """Does nothing, once the actor is there."""
        return True

    def used_s(self) -> float:
        """Returns the CPU time of the process so far."""
        return time.process_time()


class MeasuredLeader(LineLeader, Idle):
    pass


class Controller:
    def for_line(self) -> dict[str, object]:
        need = {"ranks": 1, "cpus": 1.0, "gpus": 0.0}
        return {"left_s": 86_400.0, "need": need, "sizes": [0], "priority": "normal", "gives": False}


def main() -> None:
    given = begin(__doc__, waiting=([1, 100, 1000], "runs that wait"), seconds=(20.0, "how long each is watched"))
    ray.init(address="local", num_cpus=RUNNING, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False)
    print(head("runs that wait | share of a core"))
    try:
        for number in range(RUNNING):
            ray.get(placement_group([{"CPU": 1.0}], name=group_name(f"running-{number}.x")).ready())
            ray.remote(Controller).options(name=f"raypp/running-{number}.x", num_cpus=0).remote()
        for waiting in (0, *given.waiting):
            for number in range(waiting):
                need = Need(1 + number % RUNNING, 1.0)
                cluster_view.write(
                    Ticket(f"run-{number}", "/store", 1, "ann", "normal", need, 1e6, {}, at=float(number))
                )
            kind: Any = MeasuredLeader if waiting else Idle
            leader = ray.remote(kind).options(num_cpus=0, max_concurrency=8).remote()
            ray.get(leader.look.remote())
            time.sleep(5.0)
            before = ray.get(leader.used_s.remote())
            time.sleep(given.seconds)
            share, name = (ray.get(leader.used_s.remote()) - before) / given.seconds, f"{waiting:,}"
            print(f"| {name if waiting else 'an idle actor'} | {share:.2%} |", flush=True)
            ray.kill(leader)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
