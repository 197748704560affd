"""The job language: models of the job file, loading with file:line errors, overrides."""
