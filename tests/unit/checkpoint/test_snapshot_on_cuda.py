import pytest
import torch

from raypp.state.checkpoint.snapshot import SnapshotBuffer
from raypp.state.checkpoint.state import slice_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


def test_an_update_right_after_the_snapshot_does_not_change_it() -> None:
    """The copy runs on a separate stream; the update must wait for it, the host must not."""
    weights = torch.full((64 << 20,), 1.0, device="cuda")
    buffer = SnapshotBuffer()
    buffer.take([slice_of("warm-up", weights)]).release()  # the first snapshot allocates the pinned memory
    snapshot = buffer.take([slice_of("weights", weights)])
    buffer.before_update()
    weights.fill_(2.0)
    copied = torch.frombuffer(snapshot.data(), dtype=torch.float32)
    assert bool((copied == 1.0).all())
    torch.cuda.synchronize()
    assert bool((weights == 2.0).all())
    assert snapshot.held_s > 0, "the update stood still while the device copied"


def test_tensors_of_the_host_and_the_device_share_one_snapshot() -> None:
    slices = [slice_of("a", torch.arange(5, device="cuda")), slice_of("b", torch.tensor(3.0))]
    snapshot = SnapshotBuffer().take(slices)
    data = snapshot.data()
    assert torch.frombuffer(data[:40], dtype=torch.int64).tolist() == [0, 1, 2, 3, 4]
    assert torch.frombuffer(data[40:], dtype=torch.float32).tolist() == [3.0]


def test_the_memory_of_a_snapshot_is_page_locked_until_it_is_closed() -> None:
    buffer = SnapshotBuffer()
    snapshot = buffer.take([slice_of("a", torch.arange(5, device="cuda"))])
    memory = torch.frombuffer(snapshot.data(), dtype=torch.uint8)
    assert memory.is_pinned()
    snapshot.release()
    buffer.close()
    assert not memory.is_pinned()
