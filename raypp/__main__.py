"""`python -m raypp`: the command line for environments whose scripts are not on the PATH."""

from raypp.cli.main import main

main()
