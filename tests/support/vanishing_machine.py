"""A program whose requests are under way at a machine that vanishes; see `main`.

It gets the folder of its files and prints one line for each request.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dask_processes import fetch
from distributed import Client

import daskserve as serve


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(address: str, folder: Path) -> None:
    async def hold(request: Any) -> str:
        (folder / f"begun {request.query_params['by']}").touch()
        while not (folder / "go").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
        return "done"

    with Client(address) as dask_client:
        dask_client.wait_for_workers(1, 20)
        # Place the controller and the proxy on the machine that stays connected.
        with serve.start(dask_client=dask_client, http_options={"host": "0.0.0.0", "port": 0}) as client:
            print_line("started")
            dask_client.wait_for_workers(2, 20)
            client.create_backend("hold", hold, actor_options={"resources": {"far": 1}})
            client.create_endpoint("hold", backend="hold", route="/hold", methods=["GET", "POST"])
            url = client.http_urls()[0]
            handle = client.get_handle("hold")

            def ask(by: str) -> None:
                began = time.monotonic()
                try:
                    if by == "handle":
                        answer = handle.remote(by=by).result()
                    else:
                        reply = fetch(f"{url}/hold?by={by}", by, timeout_s=60)
                        answer = f"{reply.status} {reply.text}"
                except Exception as error:
                    answer = f"{type(error).__name__} {error}"
                print_line(f"answer {json.dumps([by, answer, time.monotonic() - began])}")

            threads = [threading.Thread(target=ask, args=(by,)) for by in ("GET", "POST", "handle")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
