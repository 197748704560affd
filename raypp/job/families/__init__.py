"""Model families, one file each. `raypp.job.known_families` finds every file with a `FAMILY`."""
