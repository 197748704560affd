"""`python -m raypp`: the command line, for an environment whose scripts are not on the PATH."""

import sys

from raypp.cli.main import main

sys.exit(main())
