"""The line of runs that wait for devices: who is in it, and how to change it."""

from typing import Any

from raypp.control.clusters import known_runs
from raypp.control.clusters.find import find_cluster, lend_store_settings
from raypp.control.clusters.known_runs import RunPlace
from raypp.control.queue import client
from raypp.errors import JobError, Problem, RayppError
from raypp.state.checkpoint.layout import queued_key, spec_key
from raypp.state.checkpoint.retention import delete_run
from raypp.storage import open_store


def queue(address: str | None = None) -> dict[str, Any]:
    """Returns `{"running", "waiting", "rules", "damaged"}`: runs with devices, those that wait, in
    order, what is paused or held, and what cannot be read. `address`: of the dashboard; None:
    RAYPP_ADDRESS, then the embedded cluster. Raises UnreachableError: it does not answer."""
    return client.show(find_cluster(address))


def cancel_waiting(name: str, address: str | None = None) -> dict[str, Any]:
    """Takes the run of a name, or of URL/NAME, out of the line, and removes it from its store.

    Returns `{"run", "url", "kept"}`; `kept`: why its name is not free, empty if it is. Raises
    JobError: it does not wait, or has its turn already."""
    cluster = find_cluster(address)
    lend_store_settings(cluster.embedded)
    url, run = _url_and_run(name)
    gone = client.cancel(cluster, run, url)
    place, kept = RunPlace(gone["url"], run, cluster.address), ""
    try:
        store, number = open_store(gone["url"]), int(gone["number"])
        if number == 1:
            delete_run(store, run)
            known_runs.forget_run(place)
        else:
            store.delete([spec_key(run, number), queued_key(run, number)])
            kept = "it can be resumed again"
    except RayppError as error:  # somebody else's store
        kept = f"what it has in its store stays: {error.problems[0].fault}"
    return {"run": run, "url": gone["url"], "kept": kept}


def move(name: str, before: str, address: str | None = None) -> None:
    """Moves a run that waits directly before another; names, or URL/NAME. Raises JobError: one of
    them does not wait, or a run would pass one of higher priority."""
    if name == before:
        raise JobError(Problem("--before", f"{before} is the run itself", "name another run: `raypp queue` lists them"))
    cluster = find_cluster(address)
    lend_store_settings(cluster.embedded)
    client.move(cluster, *_url_and_run(name), *_url_and_run(before))


def _url_and_run(name: str) -> tuple[str, str]:
    url, _, run = name.rstrip("/").rpartition("/")
    return open_store(url).url if url else "", run
