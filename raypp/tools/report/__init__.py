"""The report: one HTML page about a run, or about two, that needs nothing else."""
