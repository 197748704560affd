"""What is asked of a card before a rank builds on it, and where its reporter says that it is."""

import pytest
import torch

from raypp.control.report.reporter import _Trail
from raypp.job.load import parse_job
from raypp.planning.decide import decide
from raypp.planning.decision import Facts
from raypp.rank.device_check import card_of, check_device, has_kernels_for
from raypp.rank.joining.device_memory import card_uuid, holders
from raypp.rank.own_seat import local_seat
from raypp.stages.pipeline.device_clock import device_marks
from raypp.tools.doctor.device_speed import kernel_time_limit

pytestmark = pytest.mark.gpu


def test_the_card_of_this_machine_is_known_and_can_be_used() -> None:
    card = card_of(0)
    assert card.name and card.memory > 1 << 30 and len(card.bus.split(":")) == 3
    assert has_kernels_for(card.capability, torch.cuda.get_arch_list())
    assert kernel_time_limit(0) in (False, True)
    assert card_uuid(0) and holders(card_uuid(0))
    job = parse_job({"name": "checked"})
    assert check_device(decide(job, Facts("cuda")), local_seat(0, 1, 1, job, device="cuda")) == card


def test_a_device_that_computes_is_behind_its_host() -> None:
    trail, device = _Trail(), torch.device("cuda", 0)
    mark = device_marks(lambda name, action, reached: trail.add(f"{name} {action}", reached, "load"), "step", device)
    one = torch.randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    mark("0F0")
    for _ in range(300):  # seconds of work, which the host queues in milliseconds
        one @ one
    mark("sum")
    while trail.look()[2] < 1:
        pass
    assert trail.look()[0] == "step 0F0"
    torch.cuda.synchronize()
    assert trail.look()[0] == "" and trail.look()[2] == 2
