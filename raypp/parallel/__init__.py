"""Parallelism within a stage: the device mesh, FSDP2, activation checkpointing, and the order they are applied in."""
