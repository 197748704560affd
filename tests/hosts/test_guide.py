"""Runs every command of docs/two-machines.md as written in the shells of two hosts.

Network namespaces stand in for the machines, a separate home and /tmp for each machine's disk, this
checkout for the clone, and small programs for sudo, ssh and scp. `_NOT_TYPED` lists the commands
that cannot run here.
"""

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.testbed import Network, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_ROOT = Path(__file__).parents[2]
_GUIDE = _ROOT / "docs" / "two-machines.md"
_NOT_TYPED = {
    "ethtool enp5s0": "a virtual card has no speed of a cable",
    "timedatectl": "needs systemd",
    "sudo ufw": "there is no firewall to open",
    "sudo apt install": "changes this machine",
    "git clone": "this checkout stands for it",
    "make venv": "its environment is there",
}
_LOADED = "RAY_health_check_failure_threshold=30"
"""Instead of 3: hosts that share a few cores stall for seconds at times, and Ray must not declare
them dead for that."""
_TWO_CPUS = "ray start --num-cpus=2"
"""Instead of all: a host with four CPUs would take all four ranks."""


def _blocks(section: int) -> list[str]:
    """Returns the command blocks of one numbered section."""
    text = _GUIDE.read_text().partition(f"\n## {section}. ")[2].partition("\n## ")[0]
    return re.findall(r"^```\n(.*?)^```", text, re.S | re.M)


class Shell:
    def __init__(self, network: Network, host: int, folder: Path) -> None:
        self.network, self.host = network, host
        self.home, own_tmp = folder / f"home{host}", folder / f"tmp{host}"
        for directory in (self.home, own_tmp):
            directory.mkdir()
        (self.home / "raypp").symlink_to(_ROOT)
        environment = {"PATH": f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(self.home),
                       "LANG": "C.UTF-8", "COLUMNS": "160"}  # fmt: skip
        command = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /tmp && exec bash', str(own_tmp)]
        said = folder / f"said{host}"
        with said.open("ab") as out:
            self._bash = subprocess.Popen(network.command(host, command), stdin=subprocess.PIPE, stdout=out, stderr=out,
                                          env=environment, cwd=self.home)  # fmt: skip
        self._said = said.open("rb")
        self._typed = 0

    def type(self, text: str, patience_s: float = 300, *, code: int = 0) -> str:
        """Runs some lines and returns their output. Asserts their exit code."""
        text = text.replace("RAY_health_check_failure_threshold=3", _LOADED).replace("ray start", _TWO_CPUS)
        for host in range(2):
            text = text.replace(f"192.168.1.1{host}", self.network.address(host))
        assert "192.168." not in text.replace("192.168.1.0/24", "")
        self._typed += 1
        mark = f"-- end of {self._typed}:"
        assert self._bash.stdin is not None
        self._bash.stdin.write(f'{text}\necho "{mark} $?"\n'.encode())
        self._bash.stdin.flush()
        end, said = time.monotonic() + patience_s, ""
        while True:
            said += self._said.read().decode(errors="replace")
            if found := re.search(rf"^{mark} (\d+)$", said, re.M):
                assert int(found[1]) == code, f"{text}\n{said}"
                return said[: found.start()]
            assert self._bash.poll() is None and time.monotonic() < end, f"{text}\n{said}"
            time.sleep(0.2)

    def close(self) -> None:
        self._bash.kill()
        self._bash.wait(10)
        self._said.close()


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Shell]]:
    """The shells of a and b after all commands up to step 5."""
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="raypp-guide-", dir="/var/tmp"))
    network = Network.make(f"g{time.monotonic_ns() % 10**6}", 2, "1gbit")
    shells: list[Shell] = []
    try:
        _stand_ins(folder)
        for host in range(2):
            shells.append(Shell(network, host, folder))
        yield shells
    finally:
        for shell in shells:
            shell.close()
        network.remove()
        shutil.rmtree(folder, ignore_errors=True)


def _stand_ins(folder: Path) -> None:
    """Writes stand-ins for sudo, and for ssh and scp to b, whose home is a directory here."""
    programs = {
        "sudo": 'exec "$@"',
        "ssh": f'test "$1" = b || exit 1; shift; cd {folder}/home1 && exec "$@"',
        "scp": f'test "${{3%%:*}}" = b || exit 1; exec cp -p "$2" "{folder}/home1/${{3#*:}}"',
    }
    (folder / "bin").mkdir()
    for name, body in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)


def _typed(block: str) -> str:
    """Returns a block without the lines that cannot run here."""
    return "\n".join(line for line in block.splitlines() if not line.startswith(tuple(_NOT_TYPED)))


def test_what_is_not_typed_is_still_in_the_guide() -> None:
    text = _GUIDE.read_text()
    assert all(f"\n{line}" in text for line in _NOT_TYPED)


def test_the_guide_leads_from_two_bare_machines_to_a_finished_run(machines: list[Shell]) -> None:
    a, b = machines
    look, names, firewall = _blocks(1)
    assert not _typed(firewall)
    for shell, host in ((a, 0), (b, 1)):
        assert shell.network.address(host) in shell.type(_typed(look))
        shell.type(_typed(names))
        assert shell.type("getent hosts b").split()[0] == shell.network.address(1)

    (install,) = _blocks(2)
    for shell in machines:
        shell.type(f"cd ~/raypp\n{_typed(install)}")

    (token,) = _blocks(3)
    a.type(token)
    own, copied = (shell.home / ".ray" / "auth_token" for shell in machines)
    assert own.read_bytes() == copied.read_bytes() and len(own.read_bytes()) >= 32
    assert (copied.stat().st_mode & 0o777) == 0o600

    settings, start = _blocks(4)
    for shell in machines:
        shell.type(settings)
    for line in start.splitlines():
        command, _, where = line.partition("# on ")
        {"a": a, "b": b}[where.strip()].type(command)

    server, user = _blocks(5)
    a.type(f"cd ~/raypp\n{server}")
    a.type(user)

    (examine,) = (block for block in _blocks(6) if block.startswith("raypp doctor"))
    said = a.type(examine, 600)
    assert a.network.address(0) in said and a.network.address(1) in said
    assert "rights" in said and "all" in said
    assert "links" in a.type("raypp plan jobs/quickstart.yaml --links links.json; rm links.json")

    submit, look_on = _blocks(7)
    said = a.type(submit.rstrip() + " --set train.steps=6", 900)
    for host, shell in enumerate(machines):
        assert f"on {shell.network.address(host)}" in said, said
    assert "succeeded" in said
    for line in look_on.splitlines():
        a.type(line.partition("#")[0].replace("--watch", "").replace("--follow", ""))


def test_raypp_submit_may_itself_be_a_ray_job(machines: list[Shell]) -> None:
    """Like the RayJob of cluster/kuberay: the head's environment contains the store's keys."""
    a, b = machines
    keys = a.type("env | grep ^AWS_").split()
    environment = ", ".join('"{}": "{}"'.format(*entry.split("=", 1)) for entry in keys)
    entrypoint = f"raypp submit {_ROOT}/jobs/quickstart.yaml --address http://127.0.0.1:8265".replace(
        "127.0.0.1", a.network.address(0)
    )
    options = "--set name=second --set checkpoint.url=s3://raypp/runs --set train.steps=4"
    said = b.type(
        f"ray job submit --address http://192.168.1.10:8265 --runtime-env-json '{{\"env_vars\": {{{environment}}}}}' "
        f"-- {entrypoint} {options}",
        900,
    )
    assert "succeeded" in said
