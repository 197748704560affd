"""Data: sources, tokenizers, packing, and a loader that any mesh reads alike and that can be sought."""
