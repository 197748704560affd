"""A real Slurm on the hosts of a test bed: munged, slurmctld, and a slurmd per host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from laptop import REPOSITORY, wait_for
from programs import run_program

from cluster.testbed import TestBed, why_not

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
_SCRIPT = REPOSITORY / "cluster" / "slurm" / "raypp.sbatch"


def why_no_slurm() -> str | None:
    """Returns why this machine cannot run the tests with Slurm, or None."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    if lacking := [program for program in _PROGRAMS if shutil.which(program, path=path) is None]:
        return f"{', '.join(lacking)} not installed (Debian: apt install slurmctld slurmd munge)"
    return why_not()


class SlurmBed:
    """Slurm on hosts without Ray. Host 0 runs slurmctld, and is where a user types. The folder, on
    the file system that all share, gets Slurm's files and the user's."""

    def __init__(self, bed: TestBed, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        self.there_before = set(Path("/tmp").glob("raypp-slurm-*"))
        """What a killed job of another bed left: numbers of jobs begin at 1 in each."""
        self.names = [bed.network.hostname(host) for host in range(bed.size)]
        # As an activated environment: the commands beside this interpreter are on the PATH.
        python = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        self.environment = bed.with_environment() | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "RAYPP_HOME": str(folder / "home"),
            "PATH": python,
        }
        for name in ("RAYPP_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
            self.environment.pop(name, None)

    @contextmanager
    def running(self) -> Iterator[SlurmBed]:
        """Starts Slurm and waits until all nodes are idle; ends its processes on leaving."""
        self._configure()
        conf = str(self.folder / "slurm.conf")
        munge = [f"--{name}={self.folder}/munge.{name}" for name in ("socket", "pid-file", "seed-file", "log-file")]
        key = f"--key-file={self.folder / 'munge.key'}"
        with ExitStack() as stack:
            for name, command in [
                ("munged", ["munged", "--foreground", "--force", key, *munge]),
                ("slurmctld", self.bed.command(0, ["slurmctld", "-D", "-f", conf])),
                *(
                    (name, self.bed.command(host, ["slurmd", "-D", "-N", name, "-f", conf]))
                    for host, name in enumerate(self.names)
                ),
            ]:
                stack.callback(_end, self._popen(name, command))
            wait_for(self._all_idle, "Slurm's nodes")
            yield self

    def sbatch(self, *arguments: str, out: Path) -> str:
        words = ["--parsable", f"--output={out}", *arguments[: arguments.index("--")], str(_SCRIPT)]
        return self.slurm("sbatch", *words, *arguments[arguments.index("--") + 1 :]).strip()

    def slurm(self, *command: str) -> str:
        return run_program(*self.bed.command(0, command), env=self.environment, cwd=self.folder).stdout

    def facts(self, job: str) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.slurm("scontrol", "show", "job", job).split() if "=" in word)

    def wait(self, job: str, *states: str) -> dict[str, str]:
        """Waits until a job is in one of these states; returns its facts."""
        found: dict[str, str] = {}

        def reached() -> bool:
            found.update(self.facts(job))
            return found["JobState"] in states

        wait_for(reached, f"Slurm job {job} to be {' or '.join(states)}")
        return found

    def _configure(self) -> None:
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        for name in ("state", *(f"spool-{name}" for name in self.names)):
            (self.folder / name).mkdir()
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={self.bed.network.address(host)} CPUs=4 RealMemory=8000"
            for host, name in enumerate(self.names)
        )
        # Without a cgroup file system; only the name of a plugin that is never used.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "slurm.conf").write_text(f"""
ClusterName=bed
SlurmctldHost={self.names[0]}({self.bed.network.address(0)})
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.socket
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
KillWait=10
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmdSpoolDir={self.folder}/spool-%n
StateSaveLocation={self.folder}/state
{nodes}
PartitionName=main Nodes={",".join(self.names)} Default=YES MaxTime=INFINITE State=UP
""")

    def _popen(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _all_idle(self) -> bool:
        sinfo = self.bed.command(0, ["sinfo", "-h", "-o", "%D %t"])
        done = run_program(*sinfo, code=None, env=self.environment)
        return done.stdout.split() == [str(len(self.names)), "idle"]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
