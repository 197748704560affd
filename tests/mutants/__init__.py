"""Faults made by hand, and which test finds each: `make mutants`, `python -m tests.mutants --help`.

A fault is a change of one place that a programmer could make by mistake and that a user would
notice (`faults.py`). The command copies the tree, makes one fault at a time in the copy, runs the
tests that meet the module, and notes the first that fails. A fault that no test finds is a missing
test. docs/benchmarks/mutants.md has the results.
"""
