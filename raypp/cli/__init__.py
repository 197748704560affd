"""The command line: one command family per file, each imported when it is used."""
