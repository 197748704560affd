"""What a user types works on a Mac, as far as that can be shown on Linux."""

from pathlib import Path

from programs import run_python

_ROOT = Path(__file__).parents[2]
_ON_A_MAC = """
import os, resource, select, signal, socket, sys, sysconfig, time
sysconfig.get_config_vars()
# These have builds for macOS, which this machine cannot load.
import boto3, click, numpy, psutil, pydantic, rich.console, rich.live, tokenizers, yaml, zstandard
lacking = {
    os: ["sched_getaffinity", "sched_setaffinity", "pidfd_open", "eventfd", "memfd_create", "posix_fadvise",
         "posix_fallocate", "fdatasync", "splice", "copy_file_range"],
    resource: ["prlimit"],
    select: ["epoll"],
    signal: ["pidfd_send_signal", "sigtimedwait", "sigwaitinfo"],
    socket: ["AF_NETLINK", "AF_PACKET", "SO_BINDTODEVICE", "TCP_USER_TIMEOUT", "SOCK_CLOEXEC"],
    time: ["CLOCK_BOOTTIME"],
}
for module, names in lacking.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"
from raypp.cli.main import COMMANDS, run
from raypp.registry import load_object
for place, _ in COMMANDS.values():
    load_object(place)
import raypp.api.submission, raypp.control.client, raypp.storage.s3, raypp.storage.directory
assert not {"torch", "ray"} & set(sys.modules)
sys.exit(run(sys.argv[1:]))
"""


def test_every_command_is_there_without_what_only_linux_has() -> None:
    assert "quickstart" in run_python("-c", _ON_A_MAC, "plan", "jobs/quickstart.yaml", cwd=_ROOT).stdout
