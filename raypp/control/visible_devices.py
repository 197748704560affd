"""Which device of a process is the one that Ray assigned to it. No torch, no ray."""

from __future__ import annotations

from raypp.errors import Problem, ResourcesError

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def device_position(assigned: str, visible: str | None) -> int:
    """Returns the index by which this process names a device: `cuda:INDEX`.

    Ray assigns devices by the entries of the raylet's CUDA_VISIBLE_DEVICES, and CUDA counts the
    devices of that list from 0.

    Args:
        assigned: Ray's id of the device: an index of the machine, or a UUID (`GPU-…`, `MIG-…`).
        visible: CUDA_VISIBLE_DEVICES of this process; None if it is not set.

    Raises:
        ResourcesError: The process cannot see the device.
    """
    assigned = assigned.strip()
    if visible is None:
        if assigned.isdecimal():
            return int(assigned)
        raise _refused(f"Ray assigned device {assigned!r}, but {_VARIABLE} is not set", "list the devices in it")
    entries = [entry.strip() for entry in visible.split(",")]
    told = f"{_VARIABLE}={visible!r}"
    if entries == [""]:
        raise _refused(f"{_VARIABLE} is empty, so no device is visible", "unset it, or list devices in it")
    repeated = next((entry for entry in entries if entries.count(entry) > 1), None)
    if repeated is not None:
        raise _refused(f"{told} names {repeated} twice, so CUDA shows no device", "name every device once")
    ended = next((index for index, entry in enumerate(entries) if not _valid(entry, entries[0])), len(entries))
    found = [index for index, entry in enumerate(entries) if _same(entry, assigned)]
    if not found:
        what = f"Ray assigned device {assigned}, which {told} does not contain"
        raise _refused(what, "set the same list for Ray and the job")
    if found[0] >= ended:
        what = f"CUDA ignores {told} from {entries[ended]!r} on, and with it device {assigned}, which Ray assigned"
        raise _refused(what, "list indices only, or UUIDs of one kind only (GPU- or MIG-)")
    if found[0] and assigned.startswith("MIG-"):
        what = f"CUDA shows a process only the first MIG instance of {told}, and Ray assigned {assigned}"
        raise _refused(what, "list one MIG instance; NCCL cannot join several instances of one GPU")
    return found[0]


def _valid(entry: str, first: str) -> bool:
    """Whether CUDA reads on at this entry: the kind of the first one decides."""
    for kind in ("GPU-", "MIG-"):
        if first.startswith(kind):
            return entry.startswith(kind)
    return entry.isdecimal()


def _same(entry: str, assigned: str) -> bool:
    """Whether two ids name one device. A UUID may be shortened to a prefix."""
    if entry.isdecimal() or assigned.isdecimal():
        return entry.isdecimal() and assigned.isdecimal() and int(entry) == int(assigned)
    return bool(entry) and (entry.startswith(assigned) or assigned.startswith(entry))


def _refused(what: str, fix: str) -> ResourcesError:
    return ResourcesError(Problem("resources.device", what, f"{fix} (in the environment of `ray start`)"))
