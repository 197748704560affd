"""Machines for raypp: files that start Ray on them, and the test bed that imitates them."""
