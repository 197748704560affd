"""Checkpoints: what they hold, how one begins to exist, how one is read on another mesh.

`layout`, `commit`, `verify`, `retention`, `runs` and `compatibility` know objects and bytes and import no torch;
`state`, `snapshot`, `save`, `load` and `announce` know tensors.
"""
