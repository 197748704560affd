"""Geometry: ranks and coordinates, groups, layers to stages to ranks, ranks to nodes. Standard library only."""
