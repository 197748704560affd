"""Pipelining across stages: length negotiation, the planned stage, programs on torch's runtime."""
