"""Checkpoints: what they hold, how they are committed, and how another mesh reads them.

`layout`, `commit`, `verify`, `retention`, `runs` and `compatibility` handle objects and bytes and
import no torch; `state`, `snapshot`, `save`, `load` and `announce` handle tensors.
"""
