"""Weights & Biases: a run on its server, or one in files that `wandb sync` uploads."""

from collections.abc import Mapping

from raypp.errors import Problem
from raypp.kinds import TrackerKind
from raypp.state.run_records.tracked import TrackedRun

KIND = TrackerKind(
    "wandb",
    "Weights & Biases, online or in files for `wandb sync`",
    position=20,
    library="wandb",
    install="raypp[wandb]",
    settings={
        "project": "project; default: WANDB_PROJECT, then raypp",
        "entity": "user or team; default: WANDB_ENTITY, then your own",
        "mode": "online | offline (files for `wandb sync`); default: WANDB_MODE, then online",
        "dir": "folder of the node that leads the run; default: the run's folder in its store",
    },
    variables=("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_MODE"),
    checks=True,
)


def check(options: Mapping[str, str], environment: Mapping[str, str]) -> list[Problem]:
    """Returns a problem if the mode is unknown, or if there is no key for the server."""
    mode, place = _mode(options, environment)
    if mode not in ("online", "offline"):
        return [Problem(place, f"must be online or offline, is {mode!r}", "use one of them")]
    if mode == "online" and not environment.get("WANDB_API_KEY"):
        fix = "set WANDB_API_KEY (https://wandb.ai/authorize), or use {kind: wandb, options: {mode: offline}}"
        return [Problem("", "wandb has no key for its server: WANDB_API_KEY is not set", fix)]
    return []


def _mode(options: Mapping[str, str], environment: Mapping[str, str]) -> tuple[str, str]:
    if "mode" in options:
        return options["mode"], "options.mode"
    return environment.get("WANDB_MODE") or "online", ""


class Wandb:
    """One run of Weights & Biases, by its id. It cannot take back what it has."""

    def __init__(self, run: TrackedRun) -> None:
        import os

        import wandb

        options, environment = run.options, os.environ
        for problem in check(options, environment):
            raise ValueError(str(problem))
        mode, _ = _mode(options, environment)
        self._html, self._teardown = wandb.Html, wandb.teardown
        self._run = wandb.init(
            id=run.id,
            name=run.name,
            project=options.get("project") or environment.get("WANDB_PROJECT") or "raypp",
            entity=options.get("entity"),
            config={"run": run.url, **run.config},
            dir=str(run.folder),
            mode="offline" if mode == "offline" else "online",
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                x_disable_meta=True,
                disable_git=True,
                disable_code=True,
            ),
        )
        # Values of an evaluation may follow those of later steps, which `step=` of `log` refuses.
        self._run.define_metric("*", step_metric="step")
        newest = dict(self._run.summary).get("step") if mode == "online" else None
        self.newest = int(newest) if isinstance(newest, int | float) else 0
        copied = ", copied to your machine," if "://" in run.shown_folder else ""
        offline = f"offline runs in {run.shown_folder}/wandb; `wandb sync --append offline-run-*`{copied} uploads them"
        self.where = offline if mode == "offline" else str(self._run.url)

    def values(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def text(self, step: int, time: float, name: str, text: str) -> None:
        import html

        self._run.log({"step": step, name: self._html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def rewind(self, step: int) -> bool:
        return False

    def close(self, state: str) -> None:
        self._run.finish(exit_code=1 if state == "FAILED" else 0)
        self._teardown()  # its service writes an offline run's last rows after `finish`


open_tracker = Wandb
