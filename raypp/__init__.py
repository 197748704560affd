"""raypp: Ray-orchestrated, multi-node, pipeline-parallel training of language models."""

__version__ = "0.1.0"
