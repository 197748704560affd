"""Reads documents, files and text that others may have written, within limits."""
