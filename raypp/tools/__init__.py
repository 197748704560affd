"""Who looks at a job, a run, a trained model or a cluster. Only `api` and `cli` import it."""
