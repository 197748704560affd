"""The command line. Each file has one family of commands and is imported on first use."""
