"""Serves one case of ``bench_versions.py`` until it is terminated, by the daskserve of its environment.

Arguments: what to serve (see `CASES`), the HTTP server, and the folder of that version's benchmarks, whose
``http_load`` and applications it uses. It prints its address. Its workers are its children.
"""

import os
import signal
import sys
from contextlib import contextmanager

served, server, benchmarks = sys.argv[1:]
programs = os.path.join(benchmarks, "programs")
sys.path[:0] = [benchmarks, programs]
os.environ |= {"PYTHONPATH": programs, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

from http_load import Place, serving  # noqa: E402

import daskserve as serve  # noqa: E402
from daskserve.cluster.dask.launch import start_local_cluster  # noqa: E402
from daskserve.common.settings import LocalClusterSize  # noqa: E402

WORKER_LOOP = {"event_loop": "worker"}
PLACES = {
    "no-op": Place(workers=2, server=server),
    "no-op on the worker's loop": Place(workers=2, server=server, config=WORKER_LOOP),
    "no-op, one hop": Place(hops=1, server=server),
}
APPS = {
    "FastAPI /item": ("apps:app", "/item"),
    "FastAPI /plain": ("apps:app", "/plain"),
    "FastAPI /async": ("apps:app", "/async"),
    "async class": ("apps:AsyncModel", "/"),
    "batches of 16": ("apps:BatchedModel", "/"),
    "batches of 32": ("apps:LargerBatches", "/"),
}
#: Served by one worker.
BODIES = {
    "async body": ("bodies:AsyncSize", "/"),
    "plain body": ("bodies:PlainSize", "/"),
    "Starlette body": ("bodies:app", "/"),
}


@contextmanager
def place(name):
    with serving(PLACES[name]) as system:
        yield system.url


@contextmanager
def app(target, path, workers=2):
    """Serve an application in workers, each with a proxy and a replica, with default settings."""
    cluster, dask = start_local_cluster(LocalClusterSize(workers, 2), has_dashboard=False)
    try:
        http = {"port": 0, "location": "EveryWorker", "server": server}
        with serve.start(http_options=http, dask_client=dask) as client:
            client.create_backend("app", target, config={"num_replicas": workers})
            client.create_endpoint("app", backend="app", route="/", methods=["GET", "POST"])
            yield client.http_urls()[0].rstrip("/") + path
    finally:
        dask.close()
        cluster.close()


def end(*_):
    raise SystemExit


if __name__ == "__main__":  # workers import this module, too
    signal.signal(signal.SIGTERM, end)
    if served in PLACES:
        serving_case = place(served)
    elif served in BODIES:
        serving_case = app(*BODIES[served], workers=1)
    else:
        serving_case = app(*APPS[served])
    with serving_case as url:
        print(url, flush=True)
        signal.pause()
