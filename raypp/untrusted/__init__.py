"""What somebody else may have written: documents, files and text, read within limits."""
