"""Model families, one file each. A file with a `FAMILY` is found by itself; see `raypp.spec.family`."""
