"""Measurements outside of training: parity with one process, costs of a model, device speed."""
