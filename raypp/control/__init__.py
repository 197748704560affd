"""Runs on a Ray cluster: submission, the controller and its state machine, and the workers."""
