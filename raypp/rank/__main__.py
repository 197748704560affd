"""`python -m raypp.rank`: runs one rank under torchrun."""

import sys

from raypp.quick_import import quick_import
from raypp.state.checkpoint.known_jobs import remember_job

sys.exit(quick_import("raypp.rank.torchrun").main(remember=remember_job))
