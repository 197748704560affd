"""`make test-again` reports what was not green in all runs."""

from pathlib import Path

from tests.again import not_always_green, outcomes_in

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_good[1]"/>
<testcase classname="tests.unit.test_a" name="test_skipped"><skipped/></testcase>
<testcase classname="tests.unit.test_a" name="test_bad"><failure/></testcase>
<testcase classname="tests.unit.test_a" name="test_teardown"/>
<testcase classname="tests.unit.test_a" name="test_teardown"><error/></testcase>
<testcase classname="" name="tests.unit.test_does_not_import"><error/></testcase>
</testsuite></testsuites>"""


def test_the_outcome_of_a_test_is_the_worst_of_its_parts(tmp_path: Path) -> None:
    junit = tmp_path / "test-unit.xml"
    junit.write_text(JUNIT)
    assert outcomes_in(junit) == {
        "tests.unit.test_a::test_good[1]": "passed",
        "tests.unit.test_a::test_skipped": "skipped",
        "tests.unit.test_a::test_bad": "failed",
        "tests.unit.test_a::test_teardown": "failed",
        "tests.unit.test_does_not_import": "failed",
    }


def test_what_was_not_green_in_one_run_is_reported() -> None:
    first = {"unit": {"a": "passed", "b": "failed", "c": "passed", "d": "skipped"}, "ray": {"r": "passed"}}
    second = {"unit": {"a": "passed", "b": "passed", "d": "skipped"}}
    assert not_always_green([first, second]) == [
        "ray: no results in 1 of 2 runs",
        "b: 1 failed, 1 passed",
        "c: 1 not run, 1 passed",
    ]
    assert not_always_green([second, second]) == []
