"""A rank's life: process groups, stages, steps, checkpoints. Runs the same under Ray, torchrun or a test."""
