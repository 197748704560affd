"""Ranks and coordinates, layers to stages, stages to ranks, ranks to nodes.

Uses the standard library only.
"""
