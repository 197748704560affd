"""Lines of a cluster's job that are no reports are left out."""

from __future__ import annotations

import json
import math

import pytest

from raypp.control.inference_client import report_in

GOOD = [
    {"token": [0, 5, None]},
    {"token": [3, 2**40, "eos"]},
    {"progress": {"done": 3, "total": 9, "unit": "tokens"}},
    {"error": {"problems": [["a", "b", "c"]], "exit_code": 2, "peer": False}},
    {"loss": 1.5, "perplexity": None, "tokens": 7, "bytes_per_token": 1.0, "seconds": 0.25},
    {"done": 4},
]
BAD = [
    "", "{", "5", "[1]", "null", '"{}"', "a library's words", '{"token": [0, 5]}', '{"token": [-1, 5, null]}',
    '{"token": ["0", 5, null]}', '{"token": [0, 5, 7]}', '{"progress": {"done": 1}}', '{"progress": 7}',
    '{"error": {"problems": "x", "exit_code": 2, "peer": false}}', '{"loss": "high"}', '{"tokens": 1.5}',
    '{"error": {"problems": [], "exit_code": 0, "peer": false}}', "{" * 100_000, '{"a": ' + "[" * 100_000,
    '{"token": [0, ' + "9" * 5000 + ", null]}", '{"unit": "' + "x" * (2 << 20) + '"}',
]  # fmt: skip


def test_reports_are_read_between_other_lines() -> None:
    log = [line for report in GOOD for line in ("WARNING: x", json.dumps(report), "")]
    found = [report for line in log if (report := report_in(line)) is not None]
    assert [json.loads(json.dumps(one)) for one in found] == GOOD


def test_a_loss_that_is_no_number_is_one() -> None:
    found = report_in(json.dumps({"loss": math.nan, "unknown": [1]}))
    assert found is not None and math.isnan(found["loss"]) and found.keys() == {"loss"}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:40])
def test_what_is_no_report_is_left_out(line: str) -> None:
    assert report_in(line) is None
