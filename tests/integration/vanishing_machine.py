"""Two machines as network namespaces on a switch, one of which can be unplugged, and a program on one of
them.

`main` runs the program, which gets the folder of its files and prints one line for each request.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dask_processes import fetch
from distributed import Client

import daskserve as serve

#: Code that runs first in a process and moves it to a machine.
ENTER = """
import ctypes, os
number = os.open("/var/run/netns/{machine}", os.O_RDONLY)
assert ctypes.CDLL(None, use_errno=True).setns(number, 0) == 0
os.close(number)
"""


class Machines:
    """Two machines, ``near`` and ``far``, each with an address, on one switch."""

    addresses = ("10.98.76.1", "10.98.76.2")

    def __init__(self) -> None:
        name = f"daskserve-{os.getpid()}"
        self.near, self.far, self._switch = self._namespaces = [
            f"{name}-{part}" for part in ("near", "far", "switch")
        ]

    def enter(self, machine: str) -> str:
        """Return the code that moves a Python program to a machine."""
        return ENTER.format(machine=machine)

    def make(self) -> None:
        for name in self._namespaces:
            _ip("netns", "add", name)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for machine, port, address in zip(
            (self.near, self.far), ("near", "far"), self.addresses, strict=True
        ):
            _ip(
                "link",
                "add",
                "wire",
                "netns",
                machine,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self._switch,
            )
            _ip("-n", machine, "addr", "add", f"{address}/24", "dev", "wire")
            for link in ("wire", "lo"):
                _ip("-n", machine, "link", "set", link, "up")
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")

    def unplug_far(self) -> None:
        """Drop all traffic from and to the far machine; both sides only see silence."""
        _ip("-n", self._switch, "link", "set", "far", "nomaster")

    def remove(self) -> None:
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def machines() -> Iterator[Machines]:
    """Create two machines; raise `OSError` or `subprocess.CalledProcessError` if that is not possible."""
    made = Machines()
    try:
        made.make()
        yield made
    finally:
        made.remove()


# ---- in the program


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
