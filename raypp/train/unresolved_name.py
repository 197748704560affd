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

# With one of these torch does not ask for the machine's name. Each is also a variable, PET_….
_ADDRESSES = ("local_addr", "master_port")


def handler() -> Any:
    """Returns a rendezvous backend, which torchrun expects of an entry point; nobody chooses it.

    Raises:
        SystemExit: torchrun starts raypp.train on this machine only, and would wait.
    """
    if (name := unresolved_name(sys.argv)) is not None:
        alone = "nnodes" not in _options(sys.argv) and not os.environ.get("PET_NNODES")
        print(  # noqa: T201
            f"raypp: this machine's name, {name!r}, does not resolve to an address: torchrun "
            f"{'would' if alone else 'may'} wait for ten minutes, with --standalone, too\n"
            f"  fix: torchrun --local-addr {'127.0.0.1' if alone else 'ADDRESS'} …, or add the name to /etc/hosts",
            file=sys.stderr,
            flush=True,
        )
        if alone:
            sys.exit(2)
    return _no_backend


def unresolved_name(arguments: Sequence[str]) -> str | None:
    """Returns this machine's name if it does not resolve and torchrun needs that for raypp.train.

    Args:
        arguments: torchrun's.
    """
    if "raypp.train" not in arguments:
        return None
    given = _options(arguments)
    if any(name in given or os.environ.get(f"PET_{name.upper()}") for name in _ADDRESSES):
        return None
    name = socket.getfqdn()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return name
    return None


def _options(arguments: Sequence[str]) -> set[str]:
    """Returns the names of torchrun's own options: `nproc_per_node` for `--nproc-per-node=4`."""
    own = arguments[: list(arguments).index("raypp.train")]
    return {one.lstrip("-").replace("-", "_").partition("=")[0] for one in own if one.startswith("-")}


def _no_backend(_parameters: Any) -> Any:
    raise ValueError("raypp has no rendezvous of its own; use --rdzv-backend c10d")
