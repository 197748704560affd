"""Predicts a job's costs before it runs, and resolves the choices a job file leaves open.

Imports neither torch nor Ray.
"""
