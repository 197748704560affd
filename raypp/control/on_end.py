"""What a job wants told of its run's end: `observe.on_end`."""

import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from string import Template
from typing import Any
from urllib.request import Request, urlopen

from raypp.control.credentials import scrubbed
from raypp.control.protocol import rank_environment
from raypp.state.checkpoint.run_spec import RunEnd

_TELL_S = 60.0


def tell_end(job: Mapping[str, Any], end: RunEnd) -> list[str]:
    """Posts the end of a run to the job's url and runs its command, and returns what failed. `job`:
    as plain JSON. Each takes a minute at most."""
    options = (job.get("observe") or {}).get("on_end")
    if not options:
        return []
    place, environment = f"{job['checkpoint']['url']}/{end.run}", os.environ | rank_environment(job["resources"])
    facts = {key: getattr(end, key) for key in ("run", "state", "step", "reason", "exit_code", "checkpoint")}
    message = json.dumps(facts | {"report": f"raypp report {shlex.quote(place)}"}).encode()

    def post(url: str) -> None:
        url = Template(url).safe_substitute(environment)
        urlopen(Request(url, message, {"Content-Type": "application/json"}), timeout=_TELL_S).close()

    def run(command: str) -> None:
        subprocess.run(shlex.split(command), input=message, env=environment, timeout=_TELL_S, check=True)

    failures = []
    for name, tell in {"url": post, "command": run}.items():
        try:
            if options[name]:
                tell(options[name])
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            failures.append(scrubbed(f"observe.on_end.{name} failed: {error}"))
    return failures
