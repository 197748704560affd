"""The pods that KubeRay 1.6 makes of cluster/kuberay/raycluster.yaml, without Redis."""

from dataclasses import dataclass
from typing import Any

import yaml
from laptop import REPOSITORY

_AGENT = "wget --tries 1 -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success"
_HEAD = "wget --tries 1 -T 2 -q -O- http://localhost:8265/api/gcs_healthz | grep success"


@dataclass(frozen=True)
class Pod:
    """A pod: its service's DNS name, if it is the head; what the operator runs in its container, in
    its init container, and as its readiness and liveness probe; its environment without Secrets."""

    host: str
    command: str
    before: str
    probe: str
    environment: dict[str, str]
    shm: str


def pods(namespace: str = "default") -> tuple[Pod, Pod]:
    documents = yaml.safe_load_all((REPOSITORY / "cluster" / "kuberay" / "raycluster.yaml").read_text())
    (cluster,) = (document for document in documents if document["kind"] == "RayCluster")
    name = cluster["metadata"]["name"]
    host = f"{name}-head-svc.{namespace}.svc.cluster.local"
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    head = _pod(cluster, cluster["spec"]["headGroupSpec"], host, head=True)
    return head, _pod(cluster, workers, host, head=False)


def submit_command(job: str) -> list[str]:
    """Returns the command of cluster/kuberay/submit.yaml for another job file in /jobs."""
    document = yaml.safe_load((REPOSITORY / "cluster" / "kuberay" / "submit.yaml").read_text())
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return [f"/jobs/{job}" if word.startswith("/jobs/") else str(word) for word in container["command"]]


def _pod(cluster: dict[str, Any], group: dict[str, Any], host: str, *, head: bool) -> Pod:
    spec = group["template"]["spec"]
    (container,) = spec["containers"]
    limits = container["resources"]["limits"]
    params = {
        "block": "",
        "dashboard-agent-listen-port": "52365",
        "metrics-export-port": "8080",
        "num-cpus": limits["cpu"],
        **({} if head else {"address": f"{host}:6379"}),
        **group["rayStartParams"],
    }
    words = [f"--{key}={value}" if value else f"--{key}" for key, value in sorted(params.items())]
    start = " ".join(["ray start", *(["--head"] if head else []), *words])
    given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    (shm,) = (volume["emptyDir"]["sizeLimit"] for volume in spec["volumes"] if volume["name"] == "shm")
    return Pod(
        host=host if head else "",
        command=f"ulimit -n 65536; {start}",
        before="" if head else f"until ray health-check --address {host}:6379; do sleep 1; done",
        probe=f"{_AGENT} && {_HEAD}" if head else _AGENT,
        environment={
            **given,
            "RAY_CLUSTER_NAME": cluster["metadata"]["name"],
            "RAY_PORT": "6379",
            "RAY_IP": "127.0.0.1" if head else host.partition(".")[0],
            "FQ_RAY_IP": host,
            "RAY_ADDRESS": "127.0.0.1:6379" if head else f"{host}:6379",
            "RAY_AUTH_MODE": cluster["spec"]["authOptions"]["mode"],
            "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
        },
        shm=str(shm),
    )
