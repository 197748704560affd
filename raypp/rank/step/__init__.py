"""A step of a rank, and what happens between two steps."""
