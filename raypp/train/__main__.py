"""`python -m raypp.train`: runs one rank under torchrun."""

import sys

from raypp.train.torchrun import main

sys.exit(main())
