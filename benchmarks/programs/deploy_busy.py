"""Deploys a trivial backend while every task thread of the cluster is busy.

The first argument is the number of deploys. The second says how the threads are busy: ``blocked`` in native
code that lets other threads run (simulated by a sleep), or ``python``, in Python code that holds the
interpreter lock.
"""

import json
import statistics
import sys
import time
import urllib.request

import daskserve as serve
from daskserve.cluster.dask.connection import default_client

runs, kind = int(sys.argv[1]), sys.argv[2]
client = serve.start(http_options={"port": 0})
url = client.http_urls()[0]
dask = default_client()


def spin(seconds, number):
    end = time.time() + seconds
    while time.time() < end:
        if kind == "python":
            sum(range(1000))
        else:
            time.sleep(0.5)
    return number


def answer(request):
    return "ok"


def use_empty_proxies(dask_worker):
    """Make the Host of a worker create an empty actor in place of a proxy."""
    from daskserve.cluster.worker.host import Host
    from daskserve.common.types import ActorKind

    class Empty:
        def __init__(self):
            self.verbs = {}

        async def start(self):
            return {}

        async def stop(self, grace_s):
            pass

    for actor in dask_worker.state.actors.values():
        if isinstance(actor, Host):
            actor._factories[ActorKind.PROXY] = lambda context: Empty()


def make_empty_actor():
    """Return the seconds that a Host takes to create an empty actor for this process."""
    from daskserve.cluster.protocols.base import ActorSpec
    from daskserve.common.types import ActorKind

    connection = client._connection.cluster_connection
    view = connection.cluster(client.instance_name)
    worker = sorted(dask.scheduler_info()["workers"])[0]
    spec = ActorSpec(ActorKind.PROXY, f"{client.instance_name}/empty/{time.time()}", 1, client.instance_name)
    began = time.perf_counter()
    connection.sync(view.create(spec, worker))
    return time.perf_counter() - began


dask.run(use_empty_proxies)
threads = sum(dask.nthreads().values())
spinning = dask.map(spin, [4.0 + runs * 2] * threads, range(threads), pure=False)
deadline = time.time() + 10
while sum(len(keys) for keys in dask.processing().values()) < threads and time.time() < deadline:
    time.sleep(0.05)
deploys, floors = [], []
for number in range(runs):
    floors.append(make_empty_actor())
    began = time.perf_counter()
    client.create_backend(f"b{number}", answer)
    client.create_endpoint(f"e{number}", backend=f"b{number}", route=f"/{number}")
    assert urllib.request.urlopen(f"{url}/{number}").status == 200
    deploys.append(time.perf_counter() - began)
still_busy = not any(future.done() for future in spinning)
assert still_busy, "the task threads were not busy all the time"
dask.cancel(spinning)
print(json.dumps({"deploy_s": statistics.median(deploys), "floor_s": statistics.median(floors)}), flush=True)
client.shutdown()
