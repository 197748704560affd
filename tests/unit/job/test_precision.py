"""The table of precisions, and what `auto` means on a device."""

from typing import Any, get_args

import pytest

from raypp.api.checked_job import checked
from raypp.errors import JobError
from raypp.job.job import Job
from raypp.job.job_file import job_file
from raypp.job.load import job_document, parse_job
from raypp.job.precision import (
    BF16,
    DTYPES,
    FP32,
    PRECISIONS,
    DtypeName,
    PrecisionName,
    auto_on,
    precision_of,
    whole_precision,
)


def job(**sections: Any) -> Job:
    return parse_job({"name": "table", "data": {"kind": "synthetic"}, **sections})


def test_the_words_of_a_job_are_the_rows_of_the_tables() -> None:
    assert set(get_args(DtypeName)) == set(DTYPES)
    assert set(get_args(PrecisionName)) == set(PRECISIONS)


@pytest.mark.parametrize(
    ("name", "reduce", "gradients", "copies", "narrow", "in_place"),
    [
        ("fp32", "fp32", FP32, False, False, True),
        ("bf16", "fp32", FP32, True, False, True),
        ("bf16", "bf16", FP32, True, False, False),
        ("fp16", "fp32", FP32, True, False, True),
        ("bf16_pure", "fp32", FP32, False, True, False),
        ("bf16_pure", "bf16", BF16, False, True, False),
    ],
)
def test_what_follows_from_a_precision(
    name: str, reduce: str, gradients: Any, copies: bool, narrow: bool, in_place: bool
) -> None:
    found = precision_of(name, reduce)
    assert (found.gradients, found.copies_weights) == (gradients, copies)
    assert (found.narrow_weights, found.sums_in_place) == (narrow, in_place)


def test_weights_that_are_used_as_they_are_have_a_precision() -> None:
    assert {name: whole_precision(name).name for name in DTYPES} == {
        "fp32": "fp32", "bf16": "bf16_pure", "fp16": "fp32"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "capability", "precision", "compiles"),
    [("cpu", (8, 0), "fp32", False), ("cuda", (8, 0), "bf16", "auto"), ("cuda", (7, 5), "fp16", "auto"),
     ("cuda", (6, 1), "fp32", "auto")],
)  # fmt: skip
def test_auto_is_decided_by_the_device(device: str, capability: tuple[int, int], precision: str, compiles: Any) -> None:
    asked = job(model={"lora": {}})
    assert (asked.train.precision, asked.train.compile, asked.model.lora and asked.model.lora.base) == ("auto",) * 3
    found = asked.for_device(device, cuda=auto_on(capability))
    assert (found.train.precision, found.train.compile) == (precision, compiles)
    assert found.model.lora is not None and found.model.lora.base == precision
    assert (
        parse_job(job_document(found))
        == found
        == found.for_device("cuda" if device == "cpu" else "cpu").model_copy(update={"train": found.train})
    )
    assert asked.train.precision == "auto", "the asked job is left as it was"


def test_what_a_job_says_itself_is_kept_on_every_device() -> None:
    asked = job(train={"precision": "bf16_pure", "compile": True})
    assert asked.for_device("cpu") is asked and asked.for_device("cuda", cuda="fp16") is asked


@pytest.mark.parametrize(
    ("sections", "fits"),
    [
        ({"train": {"reduce_dtype": "bf16"}}, True),
        ({"train": {"reduce_dtype": "bf16"}, "resources": {"device": "cpu"}}, False),
        ({"train": {"reduce_dtype": "bf16", "precision": "fp32"}}, False),
        ({"train": {"reduce_dtype": "bf16", "precision": "fp16"}}, False),
        ({"train": {"precision": "fp16"}, "mesh": {"pp": 2}, "pipeline": {"wire": {"dtype": "bf16"}}}, False),
        ({"train": {"precision": "fp16"}, "mesh": {"pp": 2}, "pipeline": {"wire": {"compression": "bf16"}}}, False),
        ({"train": {"precision": "fp16", "sync": {"kind": "int8"}}, "mesh": {"dp_replicate": 2}}, False),
        ({"train": {"precision": "fp16", "loss_scale": {"init": 1000}}}, False),
        ({"train": {"precision": "fp16"}, "model": {"lora": {"base": "bf16"}}}, False),
        ({"train": {"precision": "fp16"}, "model": {"lora": {}}}, True),
        ({"model": {"lora": {"base": "bf16"}}, "resources": {"device": "cuda"}}, True),
        ({"mesh": {"pp": 2}, "pipeline": {"wire": {"compression": "bf16"}}}, True),
        ({"mesh": {"pp": 2}, "pipeline": {"wire": {"compression": "bf16"}}, "resources": {"device": "cuda"}}, False),
    ],
)
def test_a_job_is_refused_where_no_device_it_may_get_can_run_it(sections: dict[str, Any], fits: bool) -> None:
    asked = job_file(job(**sections))
    if fits:
        assert checked(asked) is asked
    else:
        with pytest.raises(
            JobError,
            match=r"sums would lose|already travel in|as many bytes|int8 carries|power of two|cannot be used with",
        ):
            checked(asked)
