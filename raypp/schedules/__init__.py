"""Schedules as data: each a compute-only program per rank. Standard library only."""
