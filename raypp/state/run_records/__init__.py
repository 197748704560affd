"""A run's records: written to the store by one process, readable from anywhere."""
