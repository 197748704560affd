"""Model families, one file each: the `FAMILY` of `NAME.py` is `kind: NAME`."""
