"""Who leads a run on Ray, and what follows a failure. `tools`, `api` and `cli` import it."""
