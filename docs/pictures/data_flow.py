"""Draws `data_flow.svg`: how a job becomes a trained model. `make docs` runs it; standard library only."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1000, 660
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
    """Returns a dashed frame around boxes that run in one place, with its title `title_y` below its upper edge."""
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
        zone(340, 20, 640, 430, "the Ray cluster"),
        box(360, 55, 150, 62, "cluster", "Ray job: driver", "control"),
        box(590, 55, 260, 82, "cluster", "controller", "control: the state machine,", "with a policy of recovery"),
        zone(360, 200, 260, 235, "node a"),
        box(380, 233, 220, 84, "rank", "rank pp0-fsdp0", "stage 0: embedding, layers", "train · pipeline · parallel"),
        box(380, 335, 220, 84, "rank", "rank pp0-fsdp1", "the same stage,", "other rows"),
        zone(700, 200, 260, 235, "node b"),
        box(720, 233, 220, 84, "rank", "rank pp1-fsdp0", "stage 1: layers, head, loss", "models · data"),
        box(720, 335, 220, 84, "rank", "rank pp1-fsdp1", "the same stage,", "other rows"),
        zone(20, 500, 960, 140, "the store: S3 or a directory (storage)", 134),
        box(40, 535, 170, 84, "store", "spec.json", "the resolved job"),
        box(240, 535, 200, 84, "store", "records", "status, history, events,", "logs"),
        box(470, 535, 260, 84, "store", "step-00000100/", "one object per rank, then", "COMMIT (checkpoint)"),
        box(760, 535, 200, 84, "store", "data", "text, tokens,", "Hugging Face weights"),
        arrow("260,86 358,86", "HTTP", (312, 78)),
        arrow("510,86 588,86", "creates", (550, 78)),
        arrow("660,137 660,165 490,165 490,231", "seats, commands", (575, 159)),
        arrow("780,137 780,165 830,165 830,231", "reports, failures", (842, 185), "start", both=True),
        arrow("602,268 718,268", "activations", (660, 260), both=True),
        arrow("602,376 718,376", "gradients", (660, 368), both=True),
        arrow("60,117 60,130 30,130 30,475 90,475 90,533", "created once", (100, 470), "start"),
        arrow("250,533 250,209", "reads", (242, 380), "end"),
        arrow("588,118 550,118 550,140 315,140 315,533", "writes", (307, 380), "end"),
        arrow("490,435 490,470 600,470 600,533", "saves, loads", (610, 490), "start", both=True),
        arrow("860,533 860,437", "rows, weights", (870, 480), "start"),
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
