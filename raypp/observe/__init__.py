"""What a run tells: its records in the store, written by one process and read by anyone."""
