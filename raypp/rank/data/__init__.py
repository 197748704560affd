"""Data: sources, tokenizers, packing, and a seekable loader with the same rows on any mesh."""
