"""The fork server imports this: what each rank would otherwise import and prepare by itself."""

import gc
import os

import comparison  # noqa: F401
import harness
import training  # noqa: F401

import raypp.rank.rank  # noqa: F401
from raypp.job.load import parse_job
from raypp.planning.schedules import one_f_one_b  # noqa: F401 - imported when a job names it
from raypp.rank.optimizers import adamw, quantised_moments  # noqa: F401 - likewise

if harness.OWN_PATH in os.environ:
    os.environ["PYTHONPATH"] = os.environ.pop(harness.OWN_PATH)
else:
    del os.environ["PYTHONPATH"]

parse_job({"name": "first"})  # pydantic builds the job's validator when it is first needed
gc.collect()
gc.freeze()  # a rank's collections leave these pages shared
