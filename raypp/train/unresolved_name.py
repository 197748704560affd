"""Speaks up where `torchrun … -m raypp.train` would wait for ten minutes: on a machine whose own
name does not resolve to an address, as in most containers.

torch names its store after the machine. It waits for that name before it starts any process of
raypp's, so this is an entry point of torchrun's, which loads those of the group `torchrun.handlers`
when it starts. It does nothing for other programs.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

_ONE_NODE = (None, "1", "1:1")


def handler() -> Any:
    """Returns a rendezvous backend, which torchrun expects of an entry point; nobody chooses it.

    Raises:
        SystemExit: torchrun starts raypp.train on this machine only, and would wait.
    """
    name = socket.getfqdn()
    if asks_for_name(sys.argv, sys.modules["torch"].__version__) and not _resolves(name):
        alone = _given(sys.argv, "nnodes") in _ONE_NODE
        print(  # noqa: T201
            f"raypp: this machine's name, {name!r}, does not resolve to an address: torchrun "
            f"{'would' if alone else 'may'} wait for ten minutes\n"
            f"  fix: torchrun --local-addr {'127.0.0.1' if alone else 'ADDRESS'} …, or add the name to /etc/hosts",
            file=sys.stderr,
            flush=True,
        )
        if alone:
            sys.exit(2)
    return _no_backend


def asks_for_name(arguments: Sequence[str], torch_version: str) -> bool:
    """Returns whether torchrun starts raypp.train and needs this machine's name for it.

    Args:
        arguments: torchrun's.
        torch_version: From 2.12 on, torchrun's default on one node is c10d instead of static.
    """
    if "raypp.train" not in arguments or _given(arguments, "local_addr") is not None:
        return False
    if _given(arguments, "standalone") is not None:
        return True
    backend = _given(arguments, "rdzv_backend") or "static"
    if backend != "static":
        return True
    if any(_given(arguments, name) is not None for name in ("rdzv_endpoint", "master_port")):
        return False
    recent = tuple(int(part) for part in torch_version.split(".")[:2]) >= (2, 12)
    return recent and _given(arguments, "nnodes") in _ONE_NODE


def _given(arguments: Sequence[str], name: str) -> str | None:
    """Returns the value of an option of torchrun, or of its variable; None if it is not given."""
    own = arguments[: list(arguments).index("raypp.train")]
    for one, following in zip(own, [*own[1:], ""], strict=True):
        option, equals, value = one.partition("=")
        if one.startswith("-") and option.lstrip("-").replace("-", "_") == name:
            return value if equals else following
    return os.environ.get(f"PET_{name.upper()}")


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def _no_backend(_parameters: Any) -> Any:
    raise ValueError("raypp has no rendezvous of its own; use --rdzv-backend c10d")
