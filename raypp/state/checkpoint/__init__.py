"""Checkpoints: what they hold, how they are committed, and how another mesh reads them.

`announce`, `load_checkpoint`, `save`, `snapshot`, `state` and `upload` import torch. The other
files handle objects, bytes and numpy arrays, so that commands read checkpoints without it.
"""
