"""Ranks and coordinates, layers to stages, stages to ranks, ranks to nodes.

Imports neither torch nor Ray.
"""
