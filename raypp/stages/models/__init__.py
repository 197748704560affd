"""Decoder models: layers, attention and stages, with Hugging Face's names as global names."""
