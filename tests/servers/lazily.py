"""A module that is imported where a test uses it, not when tests are collected."""

import importlib
from typing import Any


class Lazily:
    """Stands for a module until one of its attributes is needed. `importlib.util.LazyLoader` cannot
    load transformers, which replaces itself in `sys.modules`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks every object of a test module for some
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
