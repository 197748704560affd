"""Wire formats: their precision and size, and that a restarted run repeats them."""

import pytest
import torch

from raypp.job.load import parse_job
from raypp.planning.check import wire_problems
from raypp.planning.resolve import wire_of
from raypp.stages.pipeline.wire import AsIs, Int8, message_seed, wire_format

SHAPE = (3, 40, 64)


def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SHAPE, generator=generator) * torch.logspace(-6, 4, 120).view(3, 40, 1)


def through(form: AsIs | Int8, tensor: torch.Tensor, seed: int = 0) -> torch.Tensor:
    message = form.encode(tensor, seed)
    buffer = form.buffer(tuple(tensor.shape), torch.device("cpu"))
    assert message.shape == buffer.shape and message.dtype == buffer.dtype and message.is_contiguous()
    return form.decode(buffer.copy_(message), tuple(tensor.shape), tensor.dtype)


def test_as_computed_keeps_every_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = rows().to(dtype)
        assert torch.equal(through(AsIs(dtype), tensor), tensor)


def test_bf16_is_within_2_to_the_minus_8_of_every_number() -> None:
    tensor = rows()
    assert bool(((through(AsIs(torch.bfloat16), tensor) - tensor).abs() <= tensor.abs() * 2**-8).all())


def test_int8_is_within_one_step_of_its_rows_scale() -> None:
    tensor = rows()
    step = tensor.abs().amax(-1, keepdim=True) / 127
    assert bool(((through(Int8(), tensor) - tensor).abs() <= step * 1.0001).all())


def test_int8_is_right_on_average() -> None:
    tensor = torch.linspace(-1, 1, 64).repeat(400, 1)
    mean = through(Int8(), tensor).mean(0)
    # One quantization step is 1/127. The standard deviation of the rounding is at most half of it,
    # 0.0039, so the standard error over 400 rows is 0.0039 / sqrt(400).
    assert float((mean - tensor[0]).abs().max()) < 5 * 0.0039 / 20


def test_int8_of_the_largest_number_and_of_nothing_is_exact() -> None:
    tensor = torch.tensor([[0.0] * 4, [127.0, -127.0, 0.0, 64.0]])
    assert torch.equal(through(Int8(), tensor), tensor)


def test_what_is_not_finite_does_not_become_a_number() -> None:
    for bad in (float("nan"), float("inf")):
        tensor = torch.ones(2, 4)
        tensor[0, 1] = bad
        found = through(Int8(), tensor)
        assert not bool(found[0, 1].isfinite()) and bool(found[1].isfinite().all())


def test_int8_repeats_its_noise_for_the_same_seed_and_no_other() -> None:
    tensor = rows()
    first = Int8().encode(tensor, message_seed(7, 3, 0, 1, 2))
    assert torch.equal(first, Int8().encode(tensor, message_seed(7, 3, 0, 1, 2)))
    assert not torch.equal(first, Int8().encode(tensor, message_seed(7, 4, 0, 1, 2)))


def test_encoding_leaves_the_global_random_numbers_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    Int8().encode(rows(), 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_int8_takes_a_quarter_of_the_bytes_and_a_scale_per_row() -> None:
    assert Int8().buffer(SHAPE, torch.device("meta")).nbytes == 3 * 40 * (64 + 4)
    assert AsIs(torch.float32).buffer(SHAPE, torch.device("meta")).nbytes == 3 * 40 * 64 * 4


def job(compression: object = "none", dtype: str = "auto", precision: str = "fp32"):
    wire = {"dtype": dtype, "compression": compression}
    document = {"name": "wire", "mesh": {"pp": 2}, "pipeline": {"wire": wire}, "train": {"precision": precision}}
    return parse_job(document)


@pytest.mark.parametrize(
    ("compression", "dtype", "names"),
    [
        ("none", "auto", ("float32", "float32")),
        ("none", "bf16", ("bfloat16", "bfloat16")),
        ("int8", "auto", ("int8", "int8")),
        ({"activations": "int8", "gradients": "bf16"}, "auto", ("int8", "bfloat16")),
        ({"activations": "int8"}, "auto", ("int8", "float32")),
        ({"gradients": "int8"}, "bf16", ("bfloat16", "int8")),
    ],
)
def test_activations_and_gradients_travel_as_the_job_says(
    compression: object, dtype: str, names: tuple[str, str]
) -> None:
    wire = wire_of(job(compression, dtype))
    assert (wire_format(wire.activations).name, wire_format(wire.gradients).name) == names
    assert not list(wire_problems(job(compression, dtype)))


@pytest.mark.parametrize(
    ("compression", "dtype", "precision", "key", "reported"),
    [
        ("bf16", "auto", "bf16", "pipeline.wire.compression", "already travel in bf16"),
        ("none", "fp32", "bf16", "pipeline.wire.dtype", "would double the size"),
        ("int8", "bf16", "fp32", "pipeline.wire.dtype", "all are (int8)"),
        ({"activations": "bf16"}, "fp32", "fp32", "pipeline.wire.compression", "contradicts pipeline.wire.dtype fp32"),
    ],
)
def test_what_contradicts_itself_is_refused(
    compression: object, dtype: str, precision: str, key: str, reported: str
) -> None:
    (problem,) = wire_problems(job(compression, dtype, precision))
    assert problem.key == key and reported in problem.fault
