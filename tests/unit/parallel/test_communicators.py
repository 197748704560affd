"""Each pair of ranks and each direction has a communicator of its own on NCCL. No other test would
notice if they shared one: gloo has no communicators, and numbers do not depend on it."""

import ast
from pathlib import Path

import pytest

import raypp
from raypp.tools.doctor import group_check

# `doctor --nccl` exchanges with both neighbours at once in processes of its own, beside no compute.
FILES = sorted({*Path(raypp.__file__).parent.rglob("*.py")} - {Path(group_check.__file__)})
GROUPS = ("init_process_group", "new_group", "new_subgroups_by_enumeration", "init_device_mesh", "DeviceMesh")
CALLS = (*GROUPS, "batch_isend_irecv")


def shared_by(source: str) -> list[str]:
    """Returns the calls that let messages between several pairs of ranks share a communicator."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).rsplit(".", 1)[-1]
        bound = name in GROUPS and any(keyword.arg == "device_id" for keyword in call.keywords)
        if bound or name == "batch_isend_irecv":
            found.append(ast.unparse(call))
    return found


def test_no_group_is_bound_to_a_device_and_no_messages_are_batched() -> None:
    makers = [source for file in FILES if any(f"{name}(" in (source := file.read_text()) for name in CALLS)]
    assert makers and [call for source in makers for call in shared_by(source)] == []


@pytest.mark.parametrize(
    "call", ["dist.init_process_group('nccl', device_id=device)", "torch.distributed.batch_isend_irecv(ops)"]
)
def test_a_call_that_shares_a_communicator_is_found(call: str) -> None:
    assert shared_by(call) == [call]
