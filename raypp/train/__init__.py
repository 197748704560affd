"""The life of a rank: process groups, stages, steps, checkpoints. Needs no Ray."""
