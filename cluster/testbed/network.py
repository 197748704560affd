"""The hosts' network: one namespace and one rate-limited cable per host, a bridge as the switch.

Everything is named after the instance: bridge `rt-NAME-br`, namespaces `rt-NAME-h0` …, cables
`rt-NAME-v0` …, and `/etc/netns/rt-NAME-h0` … for each host's /etc/hosts and /etc/nsswitch.conf.
`remove` finds them by these names.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from raypp.errors import JobError, Problem, RayppError

PREFIX = "rt-"
_NAME = re.compile(r"^[a-z0-9]{1,7}$")
_RATE = re.compile(r"^(\d+(?:\.\d+)?)(k|m|g)bit$")
_ETC = Path("/etc/netns")
_SCALE = {"k": 1e3, "m": 1e6, "g": 1e9}


class NetworkError(RayppError):
    """The kernel refused a part of the network."""


class Cut(StrEnum):
    """The way in which a cable is cut.

    both: unplugged; the host sees that it has no carrier. out: packets from the host are silently
    lost. in: packets to the host are silently lost.
    """

    BOTH = "both"
    OUT = "out"
    IN = "in"


def why_not() -> str | None:
    """Returns why this machine cannot run a test bed, or None."""
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"the program `{program}` is not installed (Debian, Ubuntu: apt install iproute2 util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root; run it with sudo"
    probe = f"{PREFIX}probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"this machine makes no network namespace: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None


def bits_per_s(rate: str) -> float:
    """Parses a rate such as `150mbit` or `1gbit`.

    Raises:
        JobError: The text is not a rate.
    """
    match = _RATE.match(rate.lower())
    if match is None or float(match[1]) <= 0:
        raise JobError(Problem("rate", f"{rate!r} is not a rate", "write it as 38mbit, 1gbit or none"))
    return float(match[1]) * _SCALE[match[2]]


@dataclass(frozen=True)
class Network:
    """The network of one instance.

    Attributes:
        name: At most 7 characters from a-z and 0-9: names of network devices are short.
        subnet: `10.77.N`; host i is `10.77.N.(10+i)`, the switch (this machine) `10.77.N.1`.
        size: Number of hosts.
    """

    name: str
    subnet: str
    size: int

    @classmethod
    def make(cls, name: str, size: int, rate: str = "none") -> Network:
        """Creates the network. On failure, it removes everything.

        Args:
            name: At most 7 characters from a-z and 0-9.
            size: Number of hosts.
            rate: Rate of every cable and direction, such as `1gbit`; `none`: no limit.

        Raises:
            JobError: The name or the rate is invalid, or the name is taken.
            NetworkError: The kernel refused.
        """
        if not _NAME.match(name):
            raise JobError(Problem("name", f"{name!r} is not a valid name", "use 1 to 7 characters from a-z and 0-9"))
        if not 1 <= size <= 200:
            raise JobError(Problem("hosts", f"{size} hosts are not possible", "use 1 to 200"))
        if rate != "none":
            bits_per_s(rate)
        if leftovers(name):
            raise JobError(
                Problem(
                    "name", f"a test bed {name!r} already exists", f"stop it: python -m cluster.testbed down {name}"
                )
            )
        network = cls(name, _free_subnet(), size)
        try:
            network._make(rate)
        except BaseException:
            network.remove()
            raise
        return network

    @property
    def switch(self) -> str:
        """This machine's address in the network."""
        return f"{self.subnet}.1"

    def address(self, host: int) -> str:
        return f"{self.subnet}.{10 + host}"

    def hostname(self, host: int) -> str:
        return f"{self.name}-h{host}"

    def namespace(self, host: int) -> str:
        return f"{PREFIX}{self.name}-h{host}"

    def cable(self, host: int) -> str:
        """Returns the switch's end of a host's cable. The host's end is `eth0` in its namespace."""
        return f"{PREFIX}{self.name}-v{host}"

    @property
    def bridge(self) -> str:
        return f"{PREFIX}{self.name}-br"

    # Cables ---------------------------------------------------------------------------------------

    def set_rate(self, host: int, rate: str) -> None:
        """Limits a host's cable, each direction separately (full duplex)."""
        for end in self._ends(host):
            _limit(end, rate)

    def cut(self, host: int, how: Cut = Cut.BOTH) -> None:
        """Cuts a host's cable. Packets are lost; no connection is closed."""
        outward, inward = self._ends(host)
        if how is Cut.BOTH:
            _do("ip", "link", "set", self.cable(host), "down")
        else:
            _do("tc", *(outward if how is Cut.OUT else inward).replacing("root", "blackhole"))

    def heal(self, host: int, rate: str) -> None:
        """Undoes every `cut` of a host's cable."""
        _do("ip", "link", "set", self.cable(host), "up")
        self.set_rate(host, rate)

    def condition(self, host: int, rate: str) -> str:
        """Describes a host's cable: `1gbit`, `cut`, `cut outward`, `cut inward`."""
        if "state UP" not in _do("ip", "link", "show", self.cable(host)):
            return "cut"
        lost = ["qdisc blackhole" in _do("tc", *end.showing()) for end in self._ends(host)]
        return {(True, False): "cut outward", (False, True): "cut inward"}.get((lost[0], lost[1]), rate)

    @contextlib.contextmanager
    def far_apart(self, hosts: Sequence[int], rate: str, delay_s: float) -> Iterator[None]:
        """Puts some hosts on a bridge of their own, far from the others.

        Args:
            hosts: Which of them.
            rate: Of the link in each direction, such as `20mbit`.
            delay_s: Seconds that a packet takes on it, one way.
        """
        far, taps = f"{self.bridge}2", [f"{PREFIX}{self.name}-t{end}" for end in range(2)]
        command = [sys.executable, "-m", "cluster.testbed.far_link", *taps, str(bits_per_s(rate)), str(delay_s)]
        _do("ip", "link", "add", far, "type", "bridge")
        with subprocess.Popen(command, stdout=subprocess.PIPE) as relay:
            try:
                _do("ip", "link", "set", far, "up")
                if relay.stdout is None or not relay.stdout.readline():
                    raise NetworkError("the relay of the far link does not start; it needs /dev/net/tun")
                for tap, bridge in zip(taps, (self.bridge, far), strict=True):
                    _do("ip", "link", "set", tap, "master", bridge, "up")
                for host in hosts:
                    _do("ip", "link", "set", self.cable(host), "master", far)
                yield
            finally:
                relay.kill()
                for host in hosts:
                    _do("ip", "link", "set", self.cable(host), "master", self.bridge)
                _do("ip", "link", "del", far)

    # Processes ------------------------------------------------------------------------------------

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Returns the command prefix that runs a command on a host.

        The command gets the host's network, its /etc/hosts and its host name.
        """
        as_host = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.hostname(host))
        return ["ip", "netns", "exec", self.namespace(host), *as_host, *command]

    def pids(self, host: int) -> list[int]:
        """Returns every process of a host."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace(host)], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split()]

    def signal(self, host: int, number: signal.Signals) -> int:
        """Sends a signal to all processes of a host until no new one appears; returns the count."""
        done: set[int] = set()
        while fresh := [pid for pid in self.pids(host) if pid not in done]:
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            done.update(fresh)
        return len(done)

    def kill(self, host: int, patience_s: float = 10.0) -> None:
        """Sends SIGKILL to every process of a host and waits until they are gone."""
        end = time.monotonic() + patience_s
        while self.signal(host, signal.SIGKILL):
            if time.monotonic() > end:
                raise NetworkError(f"processes of {self.namespace(host)} do not exit: {self.pids(host)}")
            time.sleep(0.05)

    def remove(self) -> None:
        """Kills every process of the hosts and removes the network; see `remove_leftovers`."""
        remove_leftovers(self.name)

    # Making ---------------------------------------------------------------------------------------

    def _make(self, rate: str) -> None:
        _do("ip", "link", "add", self.bridge, "type", "bridge")
        _do("ip", "addr", "add", f"{self.switch}/24", "dev", self.bridge)
        _do("ip", "link", "set", self.bridge, "up")
        self._let_through()
        for host in range(self.size):
            self._write_etc(host)
            inside = ("ip", "-n", self.namespace(host))
            _do("ip", "netns", "add", self.namespace(host))
            _do(*["ip", "link", "add"], self.cable(host), *["type", "veth", "peer", "name", "eth0", "netns"], inside[2])
            _do("ip", "link", "set", self.cable(host), "master", self.bridge, "up")
            _do(*inside, "link", "set", "lo", "up")
            _do(*inside, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _do(*inside, "link", "set", "eth0", "up")
            _do(*inside, "route", "add", "default", "via", self.switch)
            if _CONGESTION in _AVAILABLE.read_text().split():
                own = ("proto", "kernel", "scope", "link", "src", self.address(host))
                _do(*inside, "route", "replace", f"{self.subnet}.0/24", "dev", "eth0", *own, "congctl", _CONGESTION)
            if rate != "none":
                self.set_rate(host, rate)

    def _let_through(self) -> None:
        """Lets packets from host to host pass this machine's firewall, if it filters those of
        bridges: Docker sets that, and drops what is not its own."""
        if _FILTERED.exists() and _FILTERED.read_text().strip() == "1" and shutil.which("iptables"):
            _do("iptables", "-w", "-I", *_rule_of(self.name))

    def check_reachability(self, patience_s: float = 10.0) -> None:
        """Connects from every host to host 0, and from host 0 to the last host.

        Raises:
            NetworkError: Packets are lost or refused on the way; names the hosts and what to look
                at.
        """
        pairs = [(host, 0) for host in range(1, self.size)] + [(0, self.size - 1)] * (self.size > 1)
        listeners = {
            target: subprocess.Popen(
                self.command(target, [sys.executable, "-c", _LISTEN, self.address(target)]), stdout=subprocess.PIPE
            )
            for target in {target for _, target in pairs}
        }
        try:
            ports = {target: one.stdout.readline().decode().strip() for target, one in listeners.items() if one.stdout}
            asked = {
                (host, target): subprocess.Popen(
                    self.command(
                        host, [sys.executable, "-c", _CONNECT, self.address(target), ports[target], str(patience_s)]
                    ),
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for host, target in pairs
            }
            for (host, target), one in asked.items():
                error = one.communicate()[1].strip()
                if one.returncode:
                    raise self._unreachable(host, target, error.splitlines()[-1] if error else "no answer")
        finally:
            for listener in listeners.values():
                listener.kill()
                listener.communicate()

    def _unreachable(self, host: int, target: int, error: str) -> NetworkError:
        what = (
            f"host {self.hostname(host)} cannot reach {self.hostname(target)} ({self.address(target)}) "
            f"over the bridge {self.bridge}: {error}"
        )
        fix = (
            "look at this machine's firewall: `iptables -S FORWARD` (or `nft list ruleset`) and "
            f"`sysctl net.bridge.bridge-nf-call-iptables`; `iptables -I FORWARD {_words_of(self.bridge)}` lets "
            "the hosts' packets through"
        )
        return NetworkError(Problem("testbed", what, fix))

    def _write_etc(self, host: int) -> None:
        """Makes hosts look up names in files only.

        A DNS server that does not answer would delay every rendezvous by ten seconds.
        """
        directory = _ETC / self.namespace(host)
        directory.mkdir(parents=True, exist_ok=True)
        others = (f"{self.address(other)} {self.hostname(other)}" for other in range(self.size))
        (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *others, ""]))
        (directory / "nsswitch.conf").write_text("hosts: files\npasswd: files\ngroup: files\n")
        (directory / "resolv.conf").write_text("options timeout:1 attempts:1\n")

    def _ends(self, host: int) -> tuple[_End, _End]:
        """Returns the ends for traffic (from the host, to the host)."""
        return _End("eth0", self.namespace(host)), _End(self.cable(host), None)


@dataclass(frozen=True)
class _End:
    """One end of a cable. Packets sent at this end pass through its queue."""

    device: str
    namespace: str | None

    def replacing(self, *queue: str) -> list[str]:
        """Returns arguments for `tc` that replace the queue."""
        return [*self._inside(), "qdisc", "replace", "dev", self.device, *queue]

    def showing(self) -> list[str]:
        """Returns arguments for `tc` that show the queue."""
        return [*self._inside(), "qdisc", "show", "dev", self.device]

    def _inside(self) -> list[str]:
        return ["-n", self.namespace] if self.namespace else []


def _words_of(bridge: str) -> str:
    return f"-i {bridge}+ -o {bridge}+ -j ACCEPT"


def _rule_of(name: str) -> list[str]:
    """Returns the rule of an instance, with which it is added and deleted."""
    bridge = f"{PREFIX}{name}-br"
    return ["FORWARD", "-m", "comment", "--comment", f"raypp test bed {name}", *_words_of(bridge).split()]


_FILTERED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
_LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    link, _ = server.accept()
    link.sendall(b"here")
    link.close()
"""
_CONNECT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])) as link:
    sys.exit(link.recv(4) != b"here")
"""
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_CONGESTION = "cubic"
"""The congestion control of the hosts' connections: Linux's default, whatever this machine uses."""
_WHOLE_BLOCK = 72_000
"""Bytes that TCP's largest block (64 KiB, and the headers of its 45 packets) takes in a bucket.
Blocks that do not fit are cut into packets, and each of them wakes the reader. The network cards of
real hosts cut and join blocks in hardware, which costs their CPUs nothing."""


_OWN_QUEUE = 1000 * 1514
"""Bytes that wait in a host before its own card: Linux queues 1000 packets there. TCP is told when
one has left and does not drop any, as it would with a shorter queue and two connections."""
_SWITCH_QUEUE = "50ms"
"""How long a packet may wait at the switch before a host's cable. A longer queue drops packets."""


def _limit(end: _End, rate: str) -> None:
    """Sets the smallest token bucket that reaches the rate: it passes bursts at full speed."""
    if rate == "none":
        _do("tc", *end.replacing("root", "pfifo"))
        return
    bits = bits_per_s(rate)
    burst = max(_WHOLE_BLOCK, int(bits / 8 * 0.001))
    queue = ("limit", f"{_OWN_QUEUE}b") if end.namespace else ("latency", _SWITCH_QUEUE)
    _do("tc", *end.replacing("root", "tbf", "rate", f"{bits:.0f}bit", "burst", f"{burst}b", *queue))


def leftovers(name: str) -> list[str]:
    """Returns the existing namespaces and network devices of an instance."""
    namespaces = [one for one in _namespaces() if one.startswith(f"{PREFIX}{name}-h")]
    return namespaces + [one for one in _devices() if re.match(rf"{PREFIX}{name}-(br2?|v\d+)$", one)]


def instances() -> list[str]:
    """Returns the names of all instances that have any namespace or device."""
    found = {
        match[1] for one in [*_namespaces(), *_devices()] if (match := re.match(rf"{PREFIX}([a-z0-9]+)-[hbv]", one))
    }
    return sorted(found)


def remove_leftovers(name: str) -> list[str]:
    """Kills all processes of an instance's hosts; removes its namespaces, devices, files and
    firewall rule.

    Returns the names of what it removed.
    """
    found = leftovers(name)
    for one in found:
        if one.startswith(f"{PREFIX}{name}-h"):
            host = int(one.rpartition("h")[2])
            Network(name, "", host + 1).kill(host)
            _do("ip", "netns", "del", one)
    # Removing a namespace removes its cable.
    for one in leftovers(name):
        with contextlib.suppress(NetworkError):
            _do("ip", "link", "del", one)
    while shutil.which("iptables") and _succeeds("iptables", "-w", "-D", *_rule_of(name)):
        pass
    for directory in _ETC.glob(f"{PREFIX}{name}-h*"):
        shutil.rmtree(directory, ignore_errors=True)
    return found


def _namespaces() -> Iterator[str]:
    for line in _do("ip", "netns", "list").splitlines():
        yield line.split()[0]


def _devices() -> Iterator[str]:
    for line in _do("ip", "-o", "link", "show").splitlines():
        yield line.split(": ")[1].partition("@")[0]


def _free_subnet() -> str:
    """Returns the first 10.77.N that no interface of this machine uses."""
    used = [ipaddress.ip_interface(line.split()[3]).network for line in _do("ip", "-4", "-o", "addr").splitlines()]
    for third in range(256):
        wanted = ipaddress.ip_network(f"10.77.{third}.0/24")
        if not any(wanted.overlaps(one) for one in used):
            return f"10.77.{third}"
    raise NetworkError("every subnet of 10.77.0.0/16 is in use")


def _succeeds(*command: str) -> bool:
    return not subprocess.run(command, capture_output=True, check=False).returncode


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
