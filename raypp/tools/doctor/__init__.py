"""`raypp doctor`: examines a cluster and reports problems."""
