"""Finds and starts clusters. Imports no ray."""
