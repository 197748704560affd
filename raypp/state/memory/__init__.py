"""The memory tier: snapshots in host memory, a copy of each on another node, and their restore."""
