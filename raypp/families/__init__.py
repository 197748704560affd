"""Model families, one file each. `raypp.spec.families` finds every file that has a `FAMILY`."""
