"""Makes the pictures of the screens: `make screenshots`. They are PNG files in docs/pictures.

It trains the quickstart, smaller, on an embedded cluster of its own in /tmp/demo, kills a rank on
the way, and looks at the run as a user does: on a terminal, in Ray's dashboard, in Prometheus, in
the report. It needs Chromium and Prometheus, and five minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil
from chromium import Chromium, Page, find_chromium
from rich.text import Text
from small_png import small_png
from terminal import Terminal, as_html, screen

from raypp.control.clusters.local_servers import find_prometheus

PICTURES = Path(__file__).parents[1]
LARGEST_BYTES = 200_000
DEMO = Path("/tmp/demo")
"""A neutral place: its path is in the pictures."""
STEPS = 500
SETTINGS = tuple(
    f"--set={setting}"
    for setting in (
        "model.num_layers=2", f"train.steps={STEPS}", "pipeline.microbatches=4", "data.seq_len=128",
        "data.eval.fraction=0.02", "train.eval_every_steps=50", "checkpoint.every_steps=50",
        'train.sample.prompts=["In the beginning"]', "train.sample.every_steps=100",
    )
)  # fmt: skip
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "RAY", "PYTHON"))},
    "RAYPP_HOME": str(DEMO / "home"),
    "OMP_NUM_THREADS": "1",
    "TZ": "UTC",
}
RAYPP = [str(DEMO / "venv/bin/python"), "-m", "raypp"]


def main() -> None:
    missing = [name for name, path in (("chromium", find_chromium()), ("prometheus", find_prometheus())) if not path]
    if missing:
        sys.exit(f"make screenshots needs {' and '.join(missing)}: apt-get install {' '.join(missing)}")
    try:
        DEMO.mkdir()
    except FileExistsError:
        sys.exit(f"make screenshots works in {DEMO}, which is there: remove it")
    # The interpreter's path is in the pictures, too.
    (DEMO / "venv").symlink_to(sys.prefix)
    try:
        with Chromium() as browser:
            Studio(browser).work()
    finally:
        raypp("local", "down", "--delete-data")
        shutil.rmtree(DEMO)


class Studio:
    """Makes the pictures with one browser."""

    def __init__(self, browser: Chromium) -> None:
        self._browser = browser
        self._blank = browser.page()
        self._page = browser.page(1440, 800)

    def work(self) -> None:
        raypp("init", "quickstart")
        up = self._terminal("local", "up").wait()
        self._look("plan", "quickstart.yaml")
        submit = self._terminal("submit", "quickstart.yaml", *SETTINGS)
        wait_row(lambda row: row["step"] >= 70)
        self._terminal_picture("submit", "raypp submit quickstart.yaml", screen(submit.written))
        self._dashboard_pictures()
        kill_a_rank()
        wait_row(lambda row: row["attempt"] == 2)
        self._watch_picture()
        self._look("timeline", "quickstart", "--out", "trace.json")
        self._look("status", "quickstart")
        summary = submit.wait()
        start = [Text.from_ansi(line).plain.startswith("run quickstart") for line in summary].index(True)
        self._terminal_picture("summary", "raypp submit quickstart.yaml", summary[start:])
        self._terminal_picture("up", "raypp local up", up)
        self._prometheus_picture()
        self._report_pictures()

    # Pictures -----------------------------------------------------------------------------------

    def _dashboard_pictures(self) -> None:
        dashboard = cluster()["dashboard"]
        token = (DEMO / "home/local/token").read_text().strip()
        self._page.send_headers({"Authorization": f"Bearer {token}"})
        self._page.open(f"{dashboard}/#/jobs")
        self._page.wait_text("raypp-quickstart", "RUNNING")
        self._save(self._page, "ray-jobs")
        self._page.open(f"{dashboard}/#/actors")
        self._page.wait_text("raypp/quickstart.", "/pp1-fsdp1", "ALIVE")
        time.sleep(3)  # CPU and memory come later
        self._save(self._page, "ray-actors", height=1000)
        self._page.send_headers({})

    def _prometheus_picture(self) -> None:
        graph = {"g0.expr": "sum by (run) (ray_raypp_tokens_per_second)", "g0.tab": 0, "g0.range_input": "3m"}
        time.sleep(6)  # Prometheus' last look at the run
        self._page.open(f"{cluster()['prometheus']}/graph?{urlencode(graph)}")
        self._page.wait_text('{run="quickstart"}')
        self._save(self._page, "prometheus")

    def _report_pictures(self) -> None:
        raypp("report", "quickstart", "--out", "report.html")
        for name, width, scale, dark in (
            ("report-light", 1280, 1.0, False), ("report-dark", 1280, 1.0, True), ("report-phone", 390, 1.5, False)
        ):  # fmt: skip
            page = self._browser.page(width, 900, scale=scale, dark=dark)
            page.open((DEMO / "report.html").as_uri())
            page.wait_text("quickstart")
            self._save(page, name, height=1420 if width < 600 else 1100)
            if name == "report-light":
                page.run(
                    "[...document.querySelectorAll('h2')].find(h => /^A step/.test(h.innerText)).parentNode.id = 'step'"
                )
                self._save(page, "report-step", "#step")

    def _watch_picture(self) -> None:
        watch = Terminal([*RAYPP, "status", "quickstart", "--watch"], ENVIRONMENT, DEMO, rows=36)
        while watch.written.count(b"\x1b[H") < 10:
            assert watch.process.poll() is None, watch.written.decode(errors="replace")
            time.sleep(0.1)
        written = watch.written
        lines = screen(written[: written.rindex(b"\x1b[H")])  # the last frame may be incomplete
        self._terminal_picture("watch", "raypp status quickstart --watch", lines)
        watch.process.send_signal(signal.SIGINT)
        watch.process.wait(60)

    def _terminal_picture(self, command: str, title: str, lines: list[str]) -> None:
        name = f"terminal-{command}"
        file = DEMO / f"{name}.html"
        file.write_text(as_html(title, lines))
        page = self._browser.page(1200, 800, scale=1.25)
        page.open(file.as_uri())
        self._save(page, name, "#screen")
        page.close()

    def _save(self, page: Page, name: str, selector: str = "body", height: int | None = None) -> None:
        path = PICTURES / f"{name}.png"
        path.write_bytes(small_png(self._blank, page.picture(selector, height)))
        size = path.stat().st_size
        print(f"{path.name}  {size / 1e3:.0f} kB")  # noqa: T201
        assert size < LARGEST_BYTES, f"{path} is too large for the repository"

    # Commands -----------------------------------------------------------------------------------

    def _terminal(self, *arguments: str) -> Terminal:
        return Terminal([*RAYPP, *arguments], ENVIRONMENT, DEMO)

    def _look(self, *arguments: str) -> None:
        """Makes the picture of a command that ends by itself, named after the command."""
        self._terminal_picture(arguments[0], f"raypp {' '.join(arguments)}", self._terminal(*arguments).wait())


def raypp(*arguments: str) -> str:
    done = subprocess.run([*RAYPP, *arguments], env=ENVIRONMENT, cwd=DEMO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cluster() -> dict[str, Any]:
    return dict(json.loads(raypp("local", "status", "--json")))


def wait_row(wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Waits until the last line of the run's history is so."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        lines = raypp("history", "quickstart").splitlines() if "quickstart" in raypp("list") else []
        if lines and wanted(json.loads(lines[-1])):
            return
        time.sleep(0.2)
    raise AssertionError("the run did not come so far")


def kill_a_rank() -> None:
    """Kills one rank of this run, known by its title and its environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline()).strip()
            if title == "ray::raypp/quickstart/pp1-fsdp0" and str(DEMO) in str(process.environ()):
                process.send_signal(signal.SIGKILL)
                return
    raise AssertionError("the rank to kill was not found")


if __name__ == "__main__":
    main()
