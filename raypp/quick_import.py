"""Imports large modules without garbage collections.

The objects of torch and Ray stay. To look through them again and again while more are made took a
quarter of the time of their imports.
"""

from __future__ import annotations

import gc
import importlib
from types import ModuleType


def quick_import(name: str) -> ModuleType:
    """Imports a module; no later collection looks through the objects that exist then.

    Call it before this process has garbage, which would stay.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if collects:
            gc.enable()
