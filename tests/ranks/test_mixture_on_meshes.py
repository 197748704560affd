"""A mixture gives the numbers of one process on every mesh, and the history says what was used."""

from typing import Any

import pytest
import torch
from training import document, on_ranks

STEPS = 4
PARTS = [
    {"kind": "synthetic", "num_documents": 60, "document_len": [3, 20], "weight": 2, "epochs": 1, "name": "short"},
    {"kind": "synthetic", "num_documents": 90, "document_len": [30, 64], "weight": 1, "name": "long"},
]
PHASES = [{"from_step": 3, "weights": {"long": 4}}]


def mixed(**mesh: int) -> dict[str, Any]:
    return document(data={"kind": "mixture", "seq_len": 64, "parts": PARTS, "phases": PHASES}, **mesh)


@pytest.mark.parametrize("mesh", ["pp", "fsdp"])
def test_a_mixture_is_the_same_on_every_mesh(mesh: str) -> None:
    (one,) = on_ranks(mixed(), STEPS)
    for rank in on_ranks(mixed(**{mesh: 2}), STEPS):
        assert (rank["tokens"], rank["extras"]) == (one["tokens"], one["extras"])
        if mesh == "pp":
            assert (rank["loss"], rank["grad_norm"]) == (one["loss"], one["grad_norm"])
        else:  # its sums have another order
            torch.testing.assert_close(torch.tensor(rank["loss"]), torch.tensor(one["loss"]), rtol=1e-6, atol=0)
    last = one["extras"][-1]
    assert last["data.short.epochs"] == 1.0 and last["data.short.rows"] + last["data.long.rows"] == 16 * STEPS
    rows = [extras["data.long.rows"] for extras in one["extras"]]
    assert rows == sorted(rows)
