"""`python -m raypp.train`: runs one rank under torchrun."""

import sys

from raypp.clusters.known_jobs import remember_job
from raypp.quick_import import quick_import

sys.exit(quick_import("raypp.train.torchrun").main(remember=remember_job))
