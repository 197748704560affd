"""Accesses a Ray cluster over HTTP through its dashboard: jobs, nodes, packages. It uses plain HTTP
instead of Ray's client. So a command is spared the second that importing ray takes, and each
cluster gets its own token, whatever the Ray settings of this process are."""

import contextlib
import http.client
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from raypp.environment import too_old
from raypp.errors import JobError, Problem, RayppError, UnreachableError, words_after_stack
from raypp.proxies import FIX, is_loopback, proxy_for
from raypp.retry import Backoff
from raypp.untrusted.files import expand_home, read_file

FINAL_JOB_STATES = ("SUCCEEDED", "FAILED", "STOPPED")
_TOKEN_BYTES = 64 << 10
_URL = re.compile(r"[!-~]{1,2000}")
_AGENT_RETRY = Backoff(timeout_s=30.0, first_s=0.3, longest_s=0.3)
_OTHER = "start one with `raypp local up`, or name another with --address or RAYPP_ADDRESS"
_PROXY_ERRORS = (502, 503, 504)
"""What a proxy answers if it did not get the cluster's answer."""


class DashboardError(RayppError):
    """The cluster answered a request with an error."""

    def __init__(self, problems: Any, fix: str = "", status: int = 0) -> None:
        super().__init__(problems, fix)
        self.status = status


class NoAnswerError(UnreachableError):
    """A request was sent whole and no answer came: the cluster may have carried it out."""


@dataclass(frozen=True)
class NodeResources:
    """Resources of one live node, as Ray counts them. `gpu_bytes`: memory of its largest GPU; 0 if
    the node's agent does not tell. `free_bytes`: host memory that is available; 0 if the node's
    agent does not tell. `head`: whether it is the head, where Ray runs the drivers of jobs.
    `gpu_names`: the kinds of its GPUs, as far as the node's agent tells: `Tesla T4`."""

    node_id: str
    ip: str
    hostname: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    gpu_bytes: int = 0
    free_bytes: int = 0
    head: bool = False
    gpu_names: tuple[str, ...] = ()


def dashboard_url(address: str) -> str:
    """Normalizes `http://host:8265`, `host:8265` or `host` to `http://host:port`. Takes also what a
    browser shows, `http://host:8265/#/jobs`. Raises JobError: it is no such address."""
    text = address.strip()
    if text.startswith("ray://"):
        fix = "use the dashboard's address, as in http://host:8265"
        raise JobError(Problem("--address", f"{address!r} is a Ray Client address", fix))
    try:
        parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
        usable = parts.scheme in ("http", "https") and parts.hostname and _URL.fullmatch(text)
    except ValueError:
        usable = None
    if not usable or parts.hostname is None:
        fault = f"{address!r} is not a dashboard's address"
        raise JobError(Problem("--address", fault, "use http://host:8265 or host:8265"))
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port is None and parts.scheme == "http":
        port = 8265
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "") + parts.path.rstrip("/")


def token_from_environment() -> str | None:
    """Returns the token from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, if any."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    path = expand_home(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token")
    try:
        return read_file(path, _TOKEN_BYTES).decode(errors="replace").strip() or None
    except RayppError:
        return None


class Dashboard:
    """The dashboard of one cluster. `url`: as of `dashboard_url`. `token`: sent with requests."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 20.0) -> None:
        self.url = url
        self._token = token
        self._timeout_s = timeout_s
        # A proxy configured for the internet cannot reach a cluster on loopback.
        handlers = [urllib.request.ProxyHandler({})] if is_loopback(url) else []
        self._opener = urllib.request.build_opener(*handlers)
        host = "127.0.0.1" if is_loopback(url) else urllib.parse.urlsplit(url).hostname
        self._usual = f"use the dashboard's address, usually http://{host}:8265"
        proxy = proxy_for(url)
        self._through, self._or_proxy = (f"through {proxy}: ", f"{FIX}; otherwise ") if proxy else ("", "")

    def request(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> bytes:
        """Sends one HTTP request; `body` is bytes, or for JSON. Raises UnreachableError: nothing
        answers (`NoAnswerError` if the request was sent), or the cluster rejects the token. Raises
        DashboardError: the response is an error; `.status` is its HTTP status."""
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
                fault = f"the Ray cluster at {self.url} denies access ({error.code}: {text[:120]})"
                fix = "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to the cluster's token"
                raise UnreachableError(self._problem(fault, fix)) from None
            fault = f"{self._through}{self.url}{path} answered {error.code}: {(words_after_stack(text) or text)[-800:]}"
            raise DashboardError(fault, status=error.code) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            sent = not isinstance(error, urllib.error.URLError)  # urllib wraps what goes wrong before the answer
            fault, fix = f"no Ray cluster answers at {self.url}: {reason}", _OTHER
            if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
                grpc = str(error).startswith("\0\0")  # a frame of HTTP/2
                speaks = "gRPC, not HTTP: it may be Ray's GCS, by default on port 6379" if grpc else "another protocol"
                fault, fix = f"the server at {self.url} speaks {speaks}", self._usual
            raise (NoAnswerError if sent else UnreachableError)(self._problem(fault, fix)) from None

    def _problem(self, fault: str, fix: str) -> Problem:
        return Problem("address", f"{self._through}{fault}", f"{self._or_proxy}{fix}")

    def get_json(self, path: str, timeout_s: float | None = None) -> Any:
        """Fetches the JSON at a path; see `request` for errors."""
        answer = self.request("GET", path, timeout_s=timeout_s)
        try:
            return json.loads(answer)
        except ValueError:
            start = answer[:60].decode(errors="replace")
            fault = f"{self.url} is not a Ray dashboard: {path} answered {start!r}"
            raise UnreachableError(self._problem(fault, self._usual)) from None

    def ray_version(self) -> str:
        """Returns the cluster's Ray version; the cheapest way to check that the cluster answers."""
        try:
            return str(self.get_json("/api/version").get("ray_version", ""))
        except DashboardError as error:
            fault = f"{self.url} is not a Ray dashboard: /api/version answered {error.status}"
            raise UnreachableError(self._problem(fault, self._usual)) from None

    def check_versions(self) -> dict[str, str]:
        """Returns the versions of the cluster's `ray` and of the head's `python`. Raises
        UnreachableError: nothing answers, or raypp does not run with these versions."""
        versions = {"ray": self.ray_version()}
        with contextlib.suppress(DashboardError):
            answer = self.get_json("/api/v0/cluster_metadata")
            data = answer.get("data") if isinstance(answer, dict) else None
            versions["python"] = str(data.get("pythonVersion") or "") if isinstance(data, dict) else ""
        if old := too_old(versions):
            fix = "install `raypp[node]` on every node, and start Ray again"
            raise UnreachableError(Problem("address", f"the cluster at {self.url} has {old}", fix))
        return versions

    # Jobs ---------------------------------------------------------------------------------------

    def submit_job(self, document: dict[str, Any]) -> str:
        """Starts a Ray job and returns its id. `document`: `entrypoint`, `submission_id`,
        `runtime_env`, `metadata` … Raises DashboardError: the cluster refused, for instance because
        the id is taken. Raises NoAnswerError: whether it has the job is not known."""

        def submit() -> str:
            try:
                answer = json.loads(self.request("POST", "/api/jobs/", document, timeout_s=60))
            except DashboardError as error:
                if error.status not in _PROXY_ERRORS:
                    raise
                raise NoAnswerError(Problem("address", str(error))) from None
            return str(answer.get("submission_id") or answer["job_id"])

        # The agent that runs drivers starts some seconds after a new head answers.
        try:
            return _AGENT_RETRY.call(
                submit, lambda error: isinstance(error, DashboardError) and "No available agent" in str(error)
            )
        except NoAnswerError as lost:
            submission_id = document.get("submission_id")
            with contextlib.suppress(RayppError):
                if submission_id and self.job(submission_id) is not None:
                    return str(submission_id)
            raise lost from None

    def job(self, submission_id: str) -> dict[str, Any] | None:
        """Returns a job's record (`status`, `message`, `driver_exit_code` …) if it exists."""
        try:
            return dict(self.get_json(f"{_job_path(submission_id)}"))
        except DashboardError as error:
            if error.status == 404:
                return None
            raise

    def jobs(self) -> list[dict[str, Any]]:
        """Returns all jobs that the cluster remembers."""
        return list(self.get_json("/api/jobs/"))

    def job_logs(self, submission_id: str) -> str:
        """Returns everything that a job's driver has printed so far."""
        return str(self.get_json(f"{_job_path(submission_id)}/logs").get("logs", ""))

    def stop_job(self, submission_id: str) -> None:
        """Sends SIGTERM to a job's driver, and SIGKILL 3 s later."""
        self.request("POST", f"{_job_path(submission_id)}/stop")

    def delete_job(self, submission_id: str) -> None:
        self.request("DELETE", _job_path(submission_id))

    # Packages -----------------------------------------------------------------------------------

    def upload_package(self, name: str, data: bytes) -> str:
        """Uploads a zip file, named by its hash, unless it is there; returns its URI."""
        path = f"/api/packages/gcs/{name}"
        try:
            self.request("GET", path)
        except DashboardError as error:
            if error.status != 404:
                raise
            return self.put_package(name, data)
        return f"gcs://{name}"

    def put_package(self, name: str, data: bytes) -> str:
        """Puts data into the head's memory, where they stay until they are deleted."""
        self.request("PUT", f"/api/packages/gcs/{name}", data, timeout_s=120)
        return f"gcs://{name}"

    # Nodes --------------------------------------------------------------------------------------

    def nodes(self) -> list[NodeResources]:
        """Returns the live nodes with their free resources."""
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
                    # Fields outside "raylet" come from the node's agent, seconds after the node.
                    str(raylet.get("nodeManagerAddress") or entry.get("ip", "")),
                    str(raylet.get("nodeManagerHostname") or entry.get("hostname", "")),
                    cpus,
                    gpus,
                    cpus - float(used.get("CPU", 0)),
                    gpus - float(used.get("GPU", 0)),
                    max((int(gpu.get("memoryTotal") or 0) << 20 for gpu in entry.get("gpus") or ()), default=0),
                    int((entry.get("mem") or (0, 0))[1]),  # all, available, …
                    bool(raylet.get("isHeadNode")),
                    tuple(str(gpu.get("name")) for gpu in entry.get("gpus") or ()),
                )
            )
        return sorted(nodes, key=lambda node: node.ip)


def _job_path(submission_id: str) -> str:
    return f"/api/jobs/{urllib.parse.quote(submission_id, safe='', errors='replace')}"
