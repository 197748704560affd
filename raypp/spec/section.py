"""The base class of every section of the job file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base class of every section of the job file.

    Unknown keys are errors. Instances are immutable.
    """

    # defer_build: pydantic builds the validators on first use, so that `raypp --help` does not wait
    # for them.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)
