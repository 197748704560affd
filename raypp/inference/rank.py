"""A process that generates: one pipeline rank of a trained model.

`main` reads JSON lines: first the model and this rank's place, then prompts, until its standard
input ends. Rank 0 prints every token as a line. An error is the last line of standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch

from raypp.errors import EXIT_OK, EXIT_RUN_FAILED, Problem, RayppError, ResourcesError
from raypp.inference.source import Source
from raypp.inference.stages import load_stages
from raypp.parallel.apply import compute_dtype
from raypp.parallel.attention_choice import choose_attention
from raypp.parallel.rank_groups import make_groups
from raypp.pipeline.decode import PipelineDecoder, Prompt, length_that_changes_keys
from raypp.pipeline.next_token import Choice
from raypp.train.cuda_settings import set_product_precision
from raypp.train.lost_peer import lost_peer
from raypp.train.own_seat import local_seat
from raypp.train.process_group import joined, pick_device

_PATIENCE_S = 600.0


def main() -> int:
    """Generates as the lines of standard input ask. Returns the exit code."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        setup = json.loads(sys.stdin.readline())
        with open_decoder(_source(setup["source"]), setup["pp"], setup["rank"], setup["port"]) as decoder:
            for line in sys.stdin:
                _answer(decoder, setup, json.loads(line), out)
    except Exception as error:  # noqa: BLE001 - the parent shows it
        known = isinstance(error, RayppError)
        problems = error.problems if isinstance(error, RayppError) else [Problem("", traceback.format_exc())]
        code = error.exit_code if isinstance(error, RayppError) else EXIT_RUN_FAILED
        document = {
            "problems": [[problem.key, problem.what, problem.fix] for problem in problems],
            "exit_code": code,
            "peer": not known and lost_peer(error),
        }
        sys.stderr.write("\n" + json.dumps({"error": document}) + "\n")
        sys.stderr.flush()
        os._exit(code)  # a peer may be gone, and leaving the groups would wait for it
    return EXIT_OK


@contextmanager
def open_decoder(source: Source, pp: int, rank: int, port: int) -> Iterator[PipelineDecoder]:
    """Loads a rank's stages and joins the others. Collective over the pipeline.

    Each rank computes on the GPU of its number, or on the CPU where there is no GPU.

    Args:
        source: The model.
        pp: Number of pipeline ranks.
        rank: This pipeline rank.
        port: The loopback port where the ranks meet.

    Raises:
        ResourcesError: There are GPUs, but fewer than ranks.
        JobError: See `Source.job` and `load_stages`.
        CheckpointError: See `load_stages`.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and torch.cuda.device_count() < pp:
        what = f"pp={pp} needs as many GPUs; this machine has {torch.cuda.device_count()}"
        raise ResourcesError(Problem("--mesh", what, "use fewer ranks, or CUDA_VISIBLE_DEVICES= to compute on the CPU"))
    # CPUs have no fast products in bf16, and fp32 holds every number of it.
    job = source.job(pp, precision="bf16_pure" if kind == "cuda" and source.precision == "bf16" else "fp32")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    seat = local_seat(rank, pp, port, job, device=kind)
    device = pick_device(seat)
    if kind == "cuda":
        set_product_precision(job)
    kernel = choose_attention(job, device).kernel
    loaded = load_stages(source, job, rank, device)
    place: dict[str, Any] = {
        "stages": loaded.modules,
        "rank_of_stage": loaded.pipeline.rank_of_stage,
        "rank": rank,
        "hidden_size": job.model.hidden_size,
        "dtype": compute_dtype(job),
        "device": device,
        "kernel": kernel,
        "border": length_that_changes_keys(job.model),
    }
    if pp == 1:
        yield PipelineDecoder(**place)
        return
    with joined(seat, _PATIENCE_S):
        groups = make_groups(seat.mesh_sizes, device.type)
        yield PipelineDecoder(**place, group=groups.forward, world=range(pp))


def _source(values: dict[str, Any]) -> Source:
    return Source(**{**values, "eos_ids": tuple(values["eos_ids"]), "remarks": tuple(values["remarks"])})


def _answer(decoder: PipelineDecoder, setup: dict[str, Any], request: dict[str, Any], out: IO[str]) -> None:
    """Decodes the prompts of a request. Rank 0 writes the tokens."""
    prompts = [Prompt(tuple(tokens), limit) for tokens, limit in request["prompts"]]
    tells = decoder.rank == 0

    def emit(prompt: int, token: int, finish: str | None) -> None:
        if tells:
            out.write(json.dumps({"token": [prompt, token, finish]}) + "\n")

    decoder.run(prompts, Choice(**request["choice"]), setup["ends"], emit, rows=setup["rows"])
    if tells:
        out.write(json.dumps({"done": len(prompts)}) + "\n")
