"""Parallelism within a stage: device mesh, FSDP2, activation checkpointing, experts, context."""
