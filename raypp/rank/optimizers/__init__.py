"""The optimizers, and the bytes in which weights and moments are kept."""
