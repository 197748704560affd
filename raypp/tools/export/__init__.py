"""A checkpoint becomes a Hugging Face model or adapter."""
