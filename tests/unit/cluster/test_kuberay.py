"""The Kubernetes manifests: known fields, consistent names, a valid job. Contacts no Kubernetes."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypp.job.checks import check_spec
from raypp.job.job_file import load_job
from raypp.planning.check import check_plan

_ROOT = Path(__file__).parents[3]
_FOLDER = _ROOT / "cluster" / "kuberay"
sys.path.insert(0, str(_ROOT))

KUBERAY = {
    "RayCluster": {
        "": {"apiVersion", "kind", "metadata", "spec"},
        "spec": {"rayVersion", "authOptions", "gcsFaultToleranceOptions", "headGroupSpec", "workerGroupSpecs",
                 "suspend", "managedBy", "autoscalerOptions", "headServiceAnnotations", "enableInTreeAutoscaling",
                 "upgradeStrategy"},
        "spec.authOptions": {"mode", "secretName", "enableK8sTokenAuth"},
        "spec.gcsFaultToleranceOptions": {"redisAddress", "redisUsername", "redisPassword", "externalStorageNamespace"},
        "spec.gcsFaultToleranceOptions.redisPassword": {"value", "valueFrom"},
        "spec.headGroupSpec": {"template", "headService", "enableIngress", "resources", "labels", "rayStartParams",
                               "serviceType"},
        "spec.workerGroupSpecs": {"suspend", "groupName", "replicas", "minReplicas", "maxReplicas", "template",
                                  "idleTimeoutSeconds", "resources", "labels", "rayStartParams", "scaleStrategy",
                                  "numOfHosts"},
    },
    "RayJob": {
        "": {"apiVersion", "kind", "metadata", "spec"},
        "spec": {"activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "metadata",
                 "clusterSelector", "submitterConfig", "managedBy", "deletionStrategy", "entrypoint", "runtimeEnvYAML",
                 "jobId", "submissionMode", "entrypointResources", "entrypointNumCpus", "entrypointNumGpus",
                 "ttlSecondsAfterFinished", "shutdownAfterJobFinishes", "suspend"},
    },
}  # fmt: skip
"""Fields of the API ray.io/v1 from KubeRay 1.6's reference. Fields of pods are Kubernetes' own."""


def _documents(kind: str | None = None) -> list[dict[str, Any]]:
    found = [one for path in sorted(_FOLDER.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]
    return [one for one in found if kind in (None, one["kind"])]


def _cluster() -> dict[str, Any]:
    (cluster,) = _documents("RayCluster")
    return cluster


def _values(document: Any, key: str) -> list[Any]:
    if isinstance(document, dict):
        own = [document[key]] if key in document else []
        return own + [found for value in document.values() for found in _values(value, key)]
    return [found for value in document for found in _values(value, key)] if isinstance(document, list) else []


def _containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for found in _values(document, "containers") for one in found]


@pytest.mark.parametrize("kind", list(KUBERAY))
def test_only_fields_are_used_that_kuberay_has(kind: str) -> None:
    (document,) = _documents(kind)
    assert document["apiVersion"] == "ray.io/v1"
    for place, known in KUBERAY[kind].items():
        here: Any = document
        for part in filter(None, place.split(".")):
            here = here[part]
        for one in here if isinstance(here, list) else [here]:
            assert set(one) <= known, (place, set(one) - known)


def test_params_of_ray_start_are_strings_and_options_it_has() -> None:
    from ray.scripts.scripts import start

    known = {option.lstrip("-") for parameter in start.params for option in parameter.opts}
    for params in _values(_cluster(), "rayStartParams"):
        assert set(params) <= known
        assert all(isinstance(value, str) for value in params.values()), params


def test_ray_is_the_pinned_version_and_health_checks_are_the_recommended_ones() -> None:
    from cluster.testbed import HEALTH_CHECK

    pinned = re.search(r"^ray==(\S+)$", (_ROOT / "constraints.txt").read_text(), re.M)
    assert pinned and _cluster()["spec"]["rayVersion"] == pinned[1]
    for container in _containers(_cluster()):
        settings = {entry["name"]: entry["value"] for entry in container["env"]}
        assert settings.items() >= HEALTH_CHECK.items()


def test_every_secret_and_config_map_is_made_by_a_manifest_or_by_a_command_of_the_page() -> None:
    page = (_FOLDER / "README.md").read_text()
    made: dict[str, set[str]] = {}
    for line in re.findall(r"kubectl create secret generic ((?:.|\\\n)+?)\n", page.replace("\\\n", " ")):
        name, _, rest = line.partition(" ")
        made[name] = set(re.findall(r"--from-literal=(\w+)=", rest))
    for document in _documents():
        for reference in _values(document, "secretKeyRef"):
            assert reference["key"] in made[reference["name"]]
        for reference in _values(document, "secretRef"):
            assert reference["name"] in made
    assert "auth_token" in made[_cluster()["spec"]["authOptions"]["secretName"]]
    maps = {document["metadata"]["name"] for document in _documents("ConfigMap")}
    assert {reference["name"] for one in _documents() for reference in _values(one, "configMap")} == maps
    assert all(f"cluster/kuberay/{path.name}" in page or f"`{path.name}`" in page for path in _FOLDER.glob("*.yaml"))


def test_no_manifest_holds_a_key_of_a_store_or_a_token() -> None:
    for document in _documents():
        for entries in _values(document, "env"):
            for entry in entries:
                assert "value" not in entry or not re.search("TOKEN|PASSWORD|SECRET|ACCESS", entry["name"]), entry


def test_services_redis_and_runs_mean_this_cluster() -> None:
    cluster = _cluster()
    name = cluster["metadata"]["name"]
    (service,), (redis,) = _documents("Service"), _documents("StatefulSet")
    host, _, port = cluster["spec"]["gcsFaultToleranceOptions"]["redisAddress"].partition(":")
    assert (service["metadata"]["name"], service["spec"]["ports"][0]["port"]) == (host, int(port))
    assert service["spec"]["selector"] == redis["spec"]["template"]["metadata"]["labels"]
    (run,) = _documents("RayJob")
    assert run["spec"]["clusterSelector"] == {"ray.io/cluster": name}
    (submit,) = _documents("Job")
    assert f"http://{name}-head-svc:8265" in _containers(submit)[0]["command"]  # the service that KubeRay creates


def test_all_pods_have_one_image_and_room_for_snapshots_in_memory() -> None:
    images = {one["image"] for kind in ("RayCluster", "Job") for document in _documents(kind)
              for one in _containers(document)}  # fmt: skip
    assert len(images) == 1
    (group,) = _cluster()["spec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    (shared,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shared["emptyDir"]["medium"] == "Memory"


def test_the_job_file_is_one_that_raypp_takes_and_that_fits_the_machines(tmp_path: Path) -> None:
    (files,) = [document["data"] for document in _documents("ConfigMap")]
    ((name, text),) = files.items()
    (tmp_path / name).write_text(text)
    job = load_job(tmp_path / name).job
    assert not check_spec(job) and not check_plan(job)
    (group,) = _cluster()["spec"]["workerGroupSpecs"]
    gpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert job.mesh.pp * job.mesh.fsdp == gpus * group["replicas"]
    (run,), (submit,) = _documents("RayJob"), _documents("Job")
    for words in (run["spec"]["entrypoint"].split(), _containers(submit)[0]["command"]):
        assert words[:3] == ["raypp", "submit", f"/jobs/{name}"]
