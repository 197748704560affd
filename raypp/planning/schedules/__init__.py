"""Schedules as data: one program of computations per rank. Uses the standard library only."""
