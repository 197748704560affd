"""The mesh as a picture: stages from left to right, replicas below each other, and their links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from raypp.api.report.collect import RunData
from raypp.api.report.html import Html, joined, tag
from raypp.observe.in_words import mesh_text, rank_label, seconds_text
from raypp.observe.status import LOST
from raypp.observe.trace_analysis import measured_links

_MOST_ROWS, _MOST_COLUMNS = 16, 32
_NODE_COLOURS = 6


def mesh_picture(run: RunData) -> Html:
    """Draws every rank with its node, and what joins the stages."""
    ranks, mesh = run.status["ranks"], run.status["mesh"]
    if not ranks:
        return tag("p", "No rank has been placed.", cls="quiet")
    nodes = {node: index for index, node in enumerate(dict.fromkeys(str(rank["node"]) for rank in ranks))}
    rows: dict[tuple[int, ...], dict[int, Mapping[str, Any]]] = {}
    for rank in ranks:
        at = rank["coordinates"]
        rows.setdefault((at["dp_replicate"], at["fsdp"], at["cp"]), {})[at["pp"]] = rank
    columns = sorted({rank["coordinates"]["pp"] for rank in ranks})[:_MOST_COLUMNS]
    cells: list[Html] = [_stages(run, pp) for pp in columns]
    head = _line(cells, [tag("span")] * len(columns), "line head")
    links = _links(run, columns)
    lines = [head]
    for place in sorted(rows)[:_MOST_ROWS]:
        found = [_rank(rows[place].get(pp), mesh, nodes) for pp in columns]
        lines.append(_line(found, links))
    left_out = len(ranks) - sum(len(rows[place].keys() & set(columns)) for place in sorted(rows)[:_MOST_ROWS])
    notes = [f"{mesh_text(mesh)}, {len(ranks)} ranks on {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}"]
    notes += [f"{left_out} more ranks are not shown"] if left_out else []
    grid = tag("div", *lines, cls="mesh", style=f"--columns:{len(columns)}")
    return joined(tag("p", "; ".join(notes), cls="quiet"), tag("div", grid, cls="scroll"))


def _line(cells: Sequence[Html], links: Sequence[Html], cls: str = "line") -> Html:
    """Returns a row of cells, each but the first after its link to the one before."""
    found = [part for pair in zip(links, cells, strict=True) for part in pair]
    return tag("div", *found[1:], cls=cls)


def _stages(run: RunData, pp: int) -> Html:
    pipeline = run.pipeline
    if pipeline is None or pp >= len(pipeline.stages_of_rank):
        return tag("div", tag("strong", f"pp {pp}"), cls="stage")
    layers = [_range(pipeline.layers_of_stage[stage]) for stage in pipeline.stages_of_rank[pp]]
    return tag("div", tag("strong", f"pp {pp}"), tag("small", f"layers {', '.join(layers)}"), cls="stage")


def _range(layers: Sequence[int]) -> str:
    if not layers:
        return "none"
    return f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}–{layers[-1]}"


def _rank(rank: Mapping[str, Any] | None, mesh: Mapping[str, int], nodes: Mapping[str, int]) -> Html:
    if rank is None:
        return tag("div", cls="rank empty")
    bad = " bad" if rank["state"] in LOST else ""
    colour = nodes[str(rank["node"])] % _NODE_COLOURS
    return tag(
        "div",
        tag("strong", rank_label(rank["coordinates"], mesh)),
        tag("span", str(rank["node"]) or "this host", cls="node"),
        tag("small", f"rank {rank['rank']} · {rank['state']}"),
        cls=f"rank node{colour}{bad}",
    )


def _links(run: RunData, columns: Sequence[int]) -> list[Html]:
    """Returns the link to each pipeline rank from the one before."""
    links, pipeline = measured_links(run.events), run.pipeline
    slowest: dict[int, float] = {}
    if pipeline is not None and len(links) == len(pipeline.rank_of_stage) - 1:
        for (one, other), seconds in zip(pairwise(pipeline.rank_of_stage), links, strict=True):
            if abs(one - other) == 1:
                slowest[max(one, other)] = max(seconds, slowest.get(max(one, other), 0.0))
    told = [tag("small", seconds_text(slowest[pp])) if pp in slowest else None for pp in columns]
    return [tag("span", one, cls="link", title="a message between these stages") for one in told]
