"""Draws `data_flow.svg`: how a job becomes a trained model. `make docs` runs it; standard library
only."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1000, 700
INK, FAINT = "#1f2933", "#7b8794"
FILLS = {"you": "#fff3d6", "cluster": "#e3f0fb", "rank": "#d5ecd9", "store": "#efe5f7", "zone": "#f7f9fb"}
FONT = "font-family='Helvetica, Arial, sans-serif'"


def box(x: int, y: int, w: int, h: int, kind: str, title: str, *lines: str) -> str:
    """Returns a rounded box with a bold title and lines of text below it, centred."""
    middle, top = x + w / 2, y + h / 2 - 9 * len(lines) + 5
    rows = [
        f"<text x='{middle}' y='{top}' font-weight='bold' font-size='15' text-anchor='middle'>{escape(title)}</text>"
    ]
    for number, line in enumerate(lines, 1):
        rows.append(
            f"<text x='{middle}' y='{top + 18 * number}' font-size='13' text-anchor='middle'>{escape(line)}</text>"
        )
    frame = f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='8' fill='{FILLS[kind]}' stroke='{INK}'/>"
    return frame + "".join(rows)


def zone(x: int, y: int, w: int, h: int, title: str, title_y: int = 22) -> str:
    """Returns a dashed frame around boxes that run in one place, with its title `title_y` below its
    upper edge."""
    place = f"x='{x}' y='{y}' width='{w}' height='{h}' rx='12'"
    frame = f"<rect {place} fill='{FILLS['zone']}' stroke='{FAINT}' stroke-dasharray='6 4'/>"
    return frame + f"<text x='{x + 14}' y='{y + title_y}' font-size='13' fill='{FAINT}'>{escape(title)}</text>"


def arrow(
    points: str, label: str = "", at: tuple[int, int] = (0, 0), anchor: str = "middle", both: bool = False
) -> str:
    """Returns a line through `points` ("x,y x,y …") with an arrow head, and its label at `at`."""
    start = " marker-start='url(#back)'" if both else ""
    line = f"<polyline points='{points}' fill='none' stroke='{INK}' stroke-width='1.6' marker-end='url(#head)'{start}/>"
    text = (
        f"<text x='{at[0]}' y='{at[1]}' font-size='13' text-anchor='{anchor}'>{escape(label)}</text>" if label else ""
    )
    return line + text


def picture() -> str:
    parts = [
        zone(20, 20, 260, 210, "your shell"),
        box(40, 55, 220, 62, "you", "raypp submit job.yaml", "cli · spec · planning"),
        box(40, 145, 220, 62, "you", "raypp status", "cli · observe"),
        zone(340, 20, 640, 470, "the Ray cluster"),
        box(360, 55, 150, 62, "cluster", "Ray job: driver", "control"),
        box(590, 55, 260, 82, "cluster", "controller", "control: the state machine,", "recovery: the policy"),
        zone(360, 200, 250, 275, "node a"),
        box(375, 233, 220, 84, "rank", "rank pp0-fsdp0", "stage 0: embedding, layers", "train · pipeline · parallel"),
        box(375, 359, 220, 84, "rank", "rank pp0-fsdp1", "the same stage,", "other rows"),
        zone(710, 200, 250, 275, "node b"),
        box(725, 233, 220, 84, "rank", "rank pp1-fsdp0", "stage 1: layers, head, loss", "models · data"),
        box(725, 359, 220, 84, "rank", "rank pp1-fsdp1", "the same stage,", "other rows"),
        zone(20, 540, 960, 140, "the store: S3 or a directory (storage)", 134),
        box(40, 575, 170, 84, "store", "spec.json", "the resolved job"),
        box(240, 575, 200, 84, "store", "records", "status, history, events,", "logs (observe)"),
        box(470, 575, 260, 84, "store", "step-00000100/", "one object per rank, then", "COMMIT (checkpoint)"),
        box(760, 575, 200, 84, "store", "data", "text, tokens,", "Hugging Face weights"),
        arrow("260,86 358,86", "HTTP", (312, 78)),
        arrow("510,86 588,86", "creates", (550, 78)),
        arrow("660,137 660,165 485,165 485,198", "seats, commands, reports", (570, 159), both=True),
        arrow("780,137 780,165 835,165 835,198", "the same", (845, 185), "start", both=True),
        arrow("597,256 723,256", "activations", (660, 248)),
        arrow("723,290 597,290", "gradients", (660, 306)),
        arrow("597,382 723,382", "activations", (660, 374)),
        arrow("723,416 597,416", "gradients", (660, 432)),
        arrow("485,319 485,357", "weights, sums", (493, 342), "start", both=True),
        arrow("835,319 835,357", "the same", (843, 342), "start", both=True),
        arrow("612,460 708,460", "snapshots", (660, 478), both=True),
        arrow("60,117 60,130 30,130 30,515 90,515 90,573", "created once", (100, 510), "start"),
        arrow("250,573 250,209", "reads", (242, 400), "end"),
        arrow("588,118 550,118 550,140 315,140 315,573", "writes", (307, 400), "end"),
        arrow("600,492 600,573", "saves, loads", (610, 528), "start", both=True),
        arrow("860,573 860,492", "rows, weights", (870, 528), "start"),
    ]  # fmt: skip
    head = (
        "<marker id='{0}' viewBox='0 0 10 10' refX='{1}' refY='5' markerWidth='7' markerHeight='7' orient='auto'>"
        "<path d='{2}' fill='" + INK + "'/></marker>"
    )
    marks = head.format("head", 9, "M0,0 L10,5 L0,10 z") + head.format("back", 1, "M10,0 L0,5 L10,10 z")
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' {FONT} fill='{INK}'>\n"
        f"<title>How data flows: from a job file to a trained model</title>\n<defs>{marks}</defs>\n"
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
