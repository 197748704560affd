"""Measurements that are no part of training: parity with one process, costs of a model's parts, device speed."""
