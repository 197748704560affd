"""Imports large modules without garbage collections. The objects of torch and Ray are never freed.
Collections that scan them again and again take a quarter of the time of the imports."""

import gc
import importlib
from types import ModuleType


def quick_import(name: str) -> ModuleType:
    """Imports a module; later collections do not scan the objects that exist by then. Call it
    before this process has garbage, which would never be freed."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if collects:
            gc.enable()
