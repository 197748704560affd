"""Two hosts that have IPv6 addresses only."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from beds import bare_bed

from raypp.state.run_records.reader import RunReader
from raypp.storage.directory import DirectoryStore

_ADDRESSES = ("fd77::10", "fd77::11")
_SET_UP = "ip -6 addr add {}/64 dev eth0 nodad && ip -4 addr flush dev eth0 && cat > /etc/hosts"
_JOB = (
    "jobs/quickstart.yaml --set train.steps=4 --set mesh.pp=2 --set mesh.fsdp=1 --set name={} --set checkpoint.url={}"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pipeline_over_two_hosts_without_ipv4_is_the_same_with_ray_and_torchrun(tmp_path: Path) -> None:
    bin_folder, job = Path(sys.executable).parent, _JOB.format("torchrun", tmp_path)
    ours = f"export RAYPP_ADDRESS=http://[{_ADDRESSES[0]}]:8265 RAYPP_HOME={tmp_path}/home; {bin_folder}/raypp"
    start = f"{bin_folder}/ray start --num-cpus=1 --object-store-memory=100000000 --node-ip-address="
    short = tempfile.TemporaryDirectory(prefix="v6-", ignore_cleanup_errors=True)  # names of sockets are short
    with short as folder, bare_bed(2, "1gbit") as bed:

        def on(host: int, command: str, given: str = "") -> str:
            shell = bed.command(host, ["sh", "-c", command])
            done = subprocess.run(shell, input=given, env=bed.with_environment(), capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            return done.stdout

        names = "".join(f"{address} {bed.network.hostname(host)}\n" for host, address in enumerate(_ADDRESSES))
        for host, address in enumerate(_ADDRESSES):
            on(host, _SET_UP.format(address), f"127.0.0.1 localhost\n::1 localhost\n{names}")
        on(0, f"{start}{_ADDRESSES[0]} --temp-dir={folder}/0 --head --port=6379 --dashboard-host={_ADDRESSES[0]}")
        on(1, f"{start}{_ADDRESSES[1]} --temp-dir={folder}/1 --address='[{_ADDRESSES[0]}]:6379'")
        assert all(address in on(0, f"{ours} doctor") for address in _ADDRESSES)
        on(0, f"{ours} submit {_JOB.format('ray', tmp_path)}")
        torchrun = f"{bin_folder}/torchrun --nnodes 2 --master-addr {_ADDRESSES[0]} --master-port 29511 --local-addr"
        ranks = [
            bed.popen(host, ["sh", "-c", f"{torchrun} {address} --node-rank {host} -m raypp.rank --job {job}"])
            for host, address in enumerate(_ADDRESSES)
        ]
        assert [rank.wait() for rank in ranks] == [0, 0]
    by_ray, by_torchrun = (RunReader(DirectoryStore(tmp_path), name) for name in ("ray", "torchrun"))
    assert {event.node for event in by_ray.events() if event.kind == "seated"} == set(_ADDRESSES)
    assert any("with copies on the next node" in event.message for event in by_ray.events())
    losses = [[row["loss"] for row in reader.history()] for reader in (by_ray, by_torchrun)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
