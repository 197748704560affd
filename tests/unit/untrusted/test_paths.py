"""Paths that name the same place."""

from pathlib import Path

import pytest

from raypp.untrusted.files import same_place


@pytest.mark.parametrize(
    ("other", "same"), [("{}/runs", True), ("{}/more/../runs", True), ("{}/link", True), ("{}/more", False)]
)
def test_a_directory_is_known_in_every_spelling(tmp_path: Path, other: str, same: bool) -> None:
    for name in ("runs", "more"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    assert same_place(f"{tmp_path}/runs", other.format(tmp_path)) == same


def test_urls_are_compared_as_they_are() -> None:
    assert same_place("s3://bucket/runs", "s3://bucket/runs")
    assert not same_place("s3://bucket/runs", "s3://bucket/link/../runs")
    assert not same_place("s3://bucket/runs", "/runs")
