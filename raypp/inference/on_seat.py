"""What a rank does that a cluster has given a seat: it evaluates a model, or generates with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypp.inference.evaluate import Tell, checked, loss_on_seat
from raypp.inference.rank import answer_request, open_decoder
from raypp.inference.rank_error import error_document
from raypp.inference.source import Source
from raypp.records import Seat
from raypp.spec.load import parse_job
from raypp.train.lost_peer import lost_peer


def use_model(request: Mapping[str, Any], seat: Seat, tell: Tell) -> dict[str, Any]:
    """Does one rank's part of a request. Collective over the ranks.

    Args:
        request: `source` and, to evaluate, `job`; or `prompts`, `choice`, `ends` and `rows` as
            `Generators` sends them.
        seat: This rank's seat.
        tell: Called on rank 0 with each new token or the progress, as the local commands' processes
            print them.

    Returns:
        Rank 0's last line: the answer of the evaluation, or `done`. Or `error`, on any rank.
    """
    try:
        source = Source(**request["source"])
        if "prompts" not in request:
            answer = loss_on_seat(source, parse_job(request["job"]), seat, tell)
            return checked(answer)
        with open_decoder(source, seat) as decoder:
            answer_request(decoder, request, request, tell)
        return {"done": len(request["prompts"])}
    except Exception as error:  # noqa: BLE001 - the command that asked shows it
        return {"error": error_document(error, peer=lost_peer(error))}
