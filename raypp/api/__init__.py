"""raypp from Python, and what the commands do besides printing."""
