"""A Ray cluster as seen through its dashboard's HTTP address: jobs, nodes, packages.

Plain HTTP instead of Ray's client: a command answers without the second that importing ray takes,
and the token is sent to the cluster it belongs to, whatever this process' own Ray settings are.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypp.errors import JobError, Problem, RayppError, UnreachableError

FINAL_JOB_STATES = ("SUCCEEDED", "FAILED", "STOPPED")
_AGENT_PATIENCE_S = 30.0


class DashboardError(RayppError):
    """The cluster answered a request with an error."""

    def __init__(self, problems: Any, fix: str = "", status: int = 0) -> None:
        super().__init__(problems, fix)
        self.status = status


@dataclass(frozen=True)
class NodeResources:
    """What one living node has, as Ray counts it.

    Attributes:
        node_id, ip, hostname: Which node.
        cpus, gpus: In all.
        free_cpus, free_gpus: Not reserved by anyone now.
    """

    node_id: str
    ip: str
    hostname: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


def dashboard_url(address: str) -> str:
    """`http://host:port` from what a user may write: `http://host:8265`, `host:8265`, `host`.

    Raises:
        JobError: It is not an address of a dashboard.
    """
    text = address.strip().rstrip("/")
    if text.startswith("ray://"):
        raise JobError(
            Problem("--address", f"{address!r} is a Ray Client address", "give the dashboard's, as in http://host:8265")
        )
    parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise JobError(
            Problem(
                "--address", f"{address!r} is not a dashboard's address", "give it as http://host:8265 or host:8265"
            )
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port is None and parts.scheme == "http":
        port = 8265
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "") + parts.path


def token_from_environment() -> str | None:
    """The token Ray's own variables name, or None: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


class Dashboard:
    """One cluster's dashboard.

    Args:
        url: As `dashboard_url` returns it.
        token: Sent with every request when there is one.
        timeout_s: Longest one request may take.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 20.0) -> None:
        self.url = url
        self._token = token
        self._timeout_s = timeout_s
        # A proxy set for the internet knows nothing of a cluster on loopback or in a private network.
        handlers = [urllib.request.ProxyHandler({})] if url.startswith("http://127.") else []
        self._opener = urllib.request.build_opener(*handlers)

    def request(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> bytes:
        """One HTTP request; `body` is bytes, or anything JSON can hold.

        Raises:
            UnreachableError: Nothing answers, or the cluster refuses the token.
            DashboardError: Any other answer than success; `.status` is HTTP's.
        """
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        data = body if isinstance(body, bytes) else None
        if body is not None and data is None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        try:
            with self._opener.open(request, timeout=timeout_s or self._timeout_s) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace").strip()
            if error.code in (401, 403):
                raise UnreachableError(
                    Problem(
                        "address",
                        f"the Ray cluster at {self.url} refuses this caller ({error.code}: {text[:120]})",
                        "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to the cluster's token",
                    )
                ) from None
            raise DashboardError(f"{self.url}{path} answered {error.code}: {text[-800:]}", status=error.code) from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise UnreachableError(
                Problem(
                    "address",
                    f"no Ray cluster answers at {self.url}: {reason}",
                    "start one with `raypp local up`, or name another with --address or RAYPP_ADDRESS",
                )
            ) from None

    def get_json(self, path: str, timeout_s: float | None = None) -> Any:
        """The JSON at a path; see `request` for what it raises."""
        answer = self.request("GET", path, timeout_s=timeout_s)
        try:
            return json.loads(answer)
        except ValueError:
            raise UnreachableError(
                Problem("address", f"{self.url} is no Ray dashboard: {path} answered {answer[:60]!r}")
            ) from None

    def ray_version(self) -> str:
        """The cluster's Ray version; the cheapest question that shows that it is there."""
        try:
            return str(self.get_json("/api/version").get("ray_version", ""))
        except DashboardError as error:
            what = f"{self.url} is no Ray dashboard: /api/version answered {error.status}"
            raise UnreachableError(Problem("address", what, "name the cluster's dashboard with --address")) from None

    # Jobs ---------------------------------------------------------------------------------------

    def submit_job(self, document: dict[str, Any]) -> str:
        """Starts a Ray job (`entrypoint`, `submission_id`, `runtime_env`, `metadata` …); returns its id.

        Raises:
            DashboardError: Refused, for instance because the id is taken (Ray answers 500 to that).
        """
        end = time.monotonic() + _AGENT_PATIENCE_S
        while True:
            try:
                answer = json.loads(self.request("POST", "/api/jobs/", document, timeout_s=60))
                return str(answer.get("submission_id") or answer["job_id"])
            except DashboardError as error:
                # The agent that runs drivers comes up seconds after a fresh head answers.
                if "No available agent" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.3)

    def job(self, submission_id: str) -> dict[str, Any] | None:
        """A job's record (`status`, `message`, `driver_exit_code` …); None when there is none."""
        try:
            return dict(self.get_json(f"/api/jobs/{urllib.parse.quote(submission_id)}"))
        except DashboardError as error:
            if error.status == 404:
                return None
            raise

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs the cluster remembers."""
        return list(self.get_json("/api/jobs/"))

    def job_logs(self, submission_id: str) -> str:
        """All a job's driver printed so far."""
        return str(self.get_json(f"/api/jobs/{urllib.parse.quote(submission_id)}/logs").get("logs", ""))

    def stop_job(self, submission_id: str) -> None:
        """SIGTERM to a job's driver, SIGKILL 3 s later."""
        self.request("POST", f"/api/jobs/{urllib.parse.quote(submission_id)}/stop")

    # Packages -----------------------------------------------------------------------------------

    def upload_package(self, name: str, data: bytes) -> str:
        """Gives a zip file to the cluster (once: names are content hashes); returns its URI for a runtime_env."""
        path = f"/api/packages/gcs/{name}"
        try:
            self.request("GET", path)
        except DashboardError as error:
            if error.status != 404:
                raise
            self.request("PUT", path, data, timeout_s=120)
        return f"gcs://{name}"

    # Nodes --------------------------------------------------------------------------------------

    def nodes(self) -> list[NodeResources]:
        """The living nodes, with what is free on each."""
        summary = self.get_json("/nodes?view=summary")["data"]["summary"]
        status = (self.get_json("/api/cluster_status").get("data") or {}).get("clusterStatus") or {}
        usage = (status.get("loadMetricsReport") or {}).get("usageByNode") or {}
        nodes = []
        for entry in summary:
            raylet = entry.get("raylet") or {}
            if raylet.get("state") != "ALIVE":
                continue
            node_id = str(raylet["nodeId"])
            total = raylet.get("resourcesTotal") or {}
            used = {key: value[0] for key, value in (usage.get(node_id) or {}).items()}
            cpus, gpus = float(total.get("CPU", 0)), float(total.get("GPU", 0))
            nodes.append(
                NodeResources(
                    node_id,
                    # Those beside "raylet" come from the node's own agent, some seconds after the node itself.
                    str(raylet.get("nodeManagerAddress") or entry.get("ip", "")),
                    str(raylet.get("nodeManagerHostname") or entry.get("hostname", "")),
                    cpus,
                    gpus,
                    cpus - float(used.get("CPU", 0)),
                    gpus - float(used.get("GPU", 0)),
                )
            )
        return sorted(nodes, key=lambda node: node.ip)
