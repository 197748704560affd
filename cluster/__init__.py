"""Machines for raypp: files that start Ray on them, and a test bed that emulates them."""
