"""Finding and starting a cluster. Imports no ray."""
