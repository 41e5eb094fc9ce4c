"""A program that takes a store over, with a scheduler, a worker and an instance in its own process.

Run as ``python taking_over.py STORE PORT``. It prints a line when it begins, and runs until it is killed.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from distributed import Client, LocalCluster

import daskserve as serve


def main(store: str, port: int) -> None:
    options: dict[str, Any] = {"processes": False, "protocol": "tcp", "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(n_workers=1, threads_per_worker=4, **options) as cluster:
        with Client(cluster, set_as_default=False) as dask:
            sys.stdout.write("begins\n")
            sys.stdout.flush()
            serve.start(dask_client=dask, http_options={"port": port}, store=store, name="shared")
            threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
