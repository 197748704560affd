"""A Docker engine of the test's own; images are made from Debian's packages, not pulled."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laptop import REPOSITORY, wait_for

IMAGE = "raypp:local"
_PACKAGES = ("dockerd", "docker", "docker-compose", "debootstrap", "prometheus")
_MIRROR = "http://deb.debian.org/debian"


def why_no_engine() -> str | None:
    """Returns why this machine cannot build and run containers, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if lacking := [program for program in _PACKAGES if shutil.which(program) is None]:
        packages = "docker.io docker-compose debootstrap prometheus"
        return f"{', '.join(lacking)} not installed (Debian: apt install {packages})"
    version = re.search(r"python:(3\.\d+)", (REPOSITORY / "cluster" / "Dockerfile").read_text())
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if version is None or version[1] != here:
        return f"the wheels for the image come from this Python, {here}, and the Dockerfile has another"
    return None


class Engine:
    """A running engine, whose folder gets its data and its socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"DOCKER_HOST": f"unix://{folder}/socket", "DOCKER_BUILDKIT": "0"}

    def docker(self, *words: str, check: bool = True) -> str:
        return self.run("docker", *words, check=check)

    def run(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            words, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        assert done.returncode == 0 or not check, f"{' '.join(words)}:\n{done.stdout[-5000:]}"
        return done.stdout

    def build(self) -> None:
        """Makes the images that cluster/Dockerfile and cluster/compose.yaml name."""
        base = self.folder / "base"
        include = "--include=ca-certificates,python3,python3-pip,python-is-python3"
        self.run("debootstrap", "--variant=minbase", include, "bookworm", str(base), _MIRROR)
        # The build needs no package index: its wheels are in the base image.
        torch = re.search(r"^torch==.*$", (REPOSITORY / "constraints.txt").read_text(), re.M)
        assert torch is not None
        pip = (sys.executable, "-m", "pip", "download", "-q", "-d", str(base / "wheels"))
        others = re.sub(r"^torch==.*$", "", (REPOSITORY / "constraints.txt").read_text(), flags=re.M)
        (self.folder / "constraints.txt").write_text(others)
        self.run(*pip, "-c", f"{self.folder}/constraints.txt", torch[0], f"{REPOSITORY}[local]", "setuptools", "wheel")
        settings = "ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels PIP_BREAK_SYSTEM_PACKAGES=1"
        archive = self.folder / "base.tar"
        self.run("tar", "-C", str(base), "-cf", str(archive), ".")
        self.docker("import", "--change", settings, str(archive), "python:3.11-slim-bookworm")
        shutil.rmtree(base)
        archive.unlink()
        file = ("-f", f"{REPOSITORY}/cluster/Dockerfile", "--build-arg", "EXTRAS=local", "-t", IMAGE)
        self.docker("build", "-q", "--network", "host", *file, str(REPOSITORY))  # apt needs a network
        self._build_prometheus()

    def _build_prometheus(self) -> None:
        """Makes a stand-in of prom/prometheus from Debian's package."""
        place = self.folder / "prometheus"
        place.mkdir()
        program = shutil.which("prometheus")
        assert program is not None
        shutil.copy(program, place / "prometheus")
        (place / "Dockerfile").write_text(
            "FROM python:3.11-slim-bookworm\nCOPY prometheus /bin/prometheus\nRUN install -d -o nobody /prometheus\n"
            'USER nobody\nENTRYPOINT ["/bin/prometheus", "--storage.tsdb.path=/prometheus"]\n'
        )
        named = re.search(r"prom/prometheus:\S+", (REPOSITORY / "cluster" / "compose.yaml").read_text())
        assert named is not None
        self.docker("build", "-q", "-t", named[0], str(place))


@contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """Starts an engine that changes no rule of the machine's firewall; its containers reach each
    other and nothing else. Ends it, and removes what it holds, on leaving."""
    one = Engine(folder)
    roots = (f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid")
    network = ("--iptables=false", "--ip6tables=false", "--bridge=none")
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(
            ["dockerd", *roots, "-H", f"unix://{folder}/socket", *network],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_for(lambda: "Server Version" in one.docker("info", check=False), "the engine")
        yield one
    finally:
        if left := one.docker("ps", "-aq", check=False).split():
            one.docker("rm", "-f", *left, check=False)
        one.docker("network", "prune", "-f", check=False)
        daemon.terminate()
        daemon.wait(60)
        for line in Path("/proc/mounts").read_text().splitlines():
            if (place := line.split()[1]).startswith(f"{folder}/"):  # the engine leaves its network namespace
                subprocess.run(["umount", place], check=True)
        shutil.rmtree(folder)
