"""Decoder families. Each builds one pipeline stage at a time, with Hugging Face's names as global names."""
