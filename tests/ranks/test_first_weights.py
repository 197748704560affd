"""When a run's initial weights are drawn, and that none are if another source provides them all."""

from typing import Any

import torch
from harness import run_ranks
from training import document, seat_of

from raypp.job.load import parse_job
from raypp.planning.resolve import resolve_pipeline
from raypp.rank.build import build_stages, draw_weights
from raypp.rank.joining.process_group import joined, pick_device
from raypp.stages.parallel.rank_groups import make_groups
from raypp.stages.parallel.shard import local_part


def drawn_at_once_and_later(rank: int, world: int, port: int, source: dict[str, Any]) -> list[tuple[bool, bool]]:
    """Returns for every parameter whether it stays unset without drawing, and whether drawing at
    once and drawing later give the same bits. torch fills new memory with NaN, so a value that was
    never set is visible."""
    torch.use_deterministic_algorithms(True)
    job = parse_job(source)
    pipeline = resolve_pipeline(job)
    seat = seat_of(rank, world, port, job)
    device = pick_device(seat)
    with joined(seat, 60):
        groups = make_groups(seat.mesh_sizes, "cpu", job.mesh.ep)
        state = torch.get_rng_state()
        at_once, later = (
            build_stages(job, pipeline, groups, device, lambda action: None, draw=draw) for draw in (True, False)
        )
        expected = [local_part(p).detach().clone() for module in at_once.modules for p in module.parameters()]
        found = [local_part(p) for module in later.modules for p in module.parameters()]
        blank = [bool(value.isnan().all()) for value in found]
        draw_weights(later.modules, job)
        same = [torch.equal(a, b) for a, b in zip(expected, found, strict=True)]
        assert torch.equal(state, torch.get_rng_state()), "torch's own generator belongs to the training"
        return list(zip(blank, same, strict=True))


def test_weights_drawn_later_are_the_same_bits_and_nothing_is_drawn_before() -> None:
    for found in run_ranks(2, drawn_at_once_and_later, document(fsdp=2, microbatches=4)):
        assert len(found) > 5 and all(blank and same for blank, same in found)
