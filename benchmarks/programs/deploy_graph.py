"""Deploys applications of one and of ten deployments in turns, and prints the seconds that each takes.

The first argument is the number of rounds. The second says where: ``cluster``, on a Dask cluster of two
worker processes that `daskserve.start` makes, or ``local``, in this process.
"""

import json
import sys
import time

import daskserve as serve
from daskserve.testing import local_instance

TEN = 10


class Node:
    """Answers, given any number of deployments that it could call."""

    def __init__(self, *needs):
        self._needs = needs

    async def __call__(self, value=None):
        return value


def node(number, *needs):
    return serve.deployment(name=f"n{number}")(Node).bind(*needs)


def one():
    return node(0)


def wide():
    """Return an ingress that needs nine others."""
    return node(0, *(node(number) for number in range(1, TEN)))


def chain():
    """Return an ingress that needs one that needs one, and so on."""
    bound = node(TEN - 1)
    for number in reversed(range(TEN - 1)):
        bound = node(number, bound)
    return bound


def deploy_s(client, name, application):
    """Return the seconds until an application has been deployed and its ingress has answered."""
    began = time.perf_counter()
    handle = client.run(application, name=name, route_prefix=None)
    assert handle.remote(1).result() == 1
    took = time.perf_counter() - began
    client.delete_application(name)
    return took


def measure(client, runs):
    cases = {"one": one, "wide": wide, "chain": chain}
    took = {name: [] for name in cases}
    for number in range(runs + 1):
        for name, make in cases.items():
            seconds = deploy_s(client, f"{name}{number}", make())
            if number:  # the first round warms up
                took[name].append(seconds)
    print(json.dumps(took), flush=True)


runs, place = int(sys.argv[1]), sys.argv[2]
if place == "local":
    with local_instance() as client:
        measure(client, runs)
else:
    with serve.start(http_options={"location": "NoServer"}) as client:
        measure(client, runs)
