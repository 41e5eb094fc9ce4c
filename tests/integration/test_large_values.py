"""Large values between processes of one machine use shared memory, which is always released."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from clusters import nannied_cluster, pids
from dask_processes import poll_for
from distributed import Client

import daskserve as serve
from daskserve.errors import ServeError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shares memory")

MIB = 1 << 20
LARGE_BYTES = 8 * MIB

CALLER = f"""
import sys
import numpy as np
from distributed import Client
import daskserve as serve
with Client(sys.argv[1]) as dask:
    handle = serve.connect(dask_client=dask).get_handle("keeper")
    handle.remote(np.zeros({LARGE_BYTES}, np.uint8)).result(20)
    print("kept", flush=True)
    while True:
        handle.options(method_name="echo").remote(np.ones({10 * LARGE_BYTES}, np.uint8)).result(20)
"""


class Keeper:
    """Keeps the arrays among its arguments."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, array: Any) -> tuple[int, bool, int]:
        self.kept.append(array)
        return os.getpid(), array.flags.writeable, int(array[-1])

    def echo(self, array: Any) -> Any:
        return array

    def slowly(self, array: Any) -> Any:
        time.sleep(0.2)
        return array

    def last(self) -> list[int]:
        return [int(each[-1]) for each in self.kept]

    def drop(self) -> None:
        self.kept.clear()


def segments_of(*processes: int) -> list[str]:
    """Return the mapped or open segments of some processes and their children."""
    found = []
    for parent in processes:
        for each in (parent, *(child.pid for child in psutil.Process(parent).children(recursive=True))):
            with contextlib.suppress(OSError):  # the process has ended
                names = Path(f"/proc/{each}/maps").read_text(encoding="utf-8").splitlines()
                for file in Path(f"/proc/{each}/fd").iterdir():
                    with contextlib.suppress(OSError):  # another thread has closed the file
                        names.append(os.readlink(file))
                found += [f"{each}: {name}" for name in names if "memfd:daskserve" in name]
    return found


def wait_until_unshared(*processes: int) -> None:
    poll_for(lambda: not segments_of(*processes), what=lambda: segments_of(*processes), every_s=0.1)


@pytest.fixture(scope="module")
def dask() -> Iterator[Client]:
    with nannied_cluster(1) as client:
        yield client


@pytest.fixture(scope="module")
def client(dask: Client) -> Iterator[serve.Client]:
    client = serve.start(dask_client=dask, detached=True, http_options={"location": "NoServer"})
    yield client
    client.shutdown()


@pytest.mark.parametrize("isolation", [pytest.param("thread", marks=pytest.mark.nightly), "process"])
def test_arrays_share_memory_with_the_replica_until_dropped(
    dask: Client, client: serve.Client, isolation: str
) -> None:
    client.deploy("keeper", Keeper, config={"isolation": isolation})
    try:
        handle = client.get_handle("keeper")
        array = np.ones(LARGE_BYTES, np.uint8)
        (worker,) = pids(dask).values()
        for number in range(3):
            array[-1] = number
            replica, is_writable, last = handle.remote(array).result(20)
            assert (is_writable, last) == (False, number)
            assert any(f"{replica}:" in each for each in segments_of(worker))
        assert handle.options(method_name="last").remote().result(20) == [0, 1, 2]
        echoed = handle.options(method_name="echo").remote(array).result(20)
        assert (echoed == array).all()
        assert not echoed.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            echoed[0] = 0
        assert segments_of(os.getpid())
        del echoed
        handle.options(method_name="drop").remote().result(20)
        wait_until_unshared(os.getpid(), worker)
    finally:
        client.delete_deployment("keeper")


class Holder:
    """Holds its constructor argument."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __call__(self) -> tuple[int, int, int, bool]:
        return os.getpid(), int(self.array[0]), int(self.array[-1]), self.array.flags.writeable


@pytest.mark.nightly
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_replicas_share_the_memory_of_their_constructor_arguments(
    dask: Client, client: serve.Client, isolation: str
) -> None:
    array = np.ones(LARGE_BYTES, np.uint8)
    config = {"isolation": isolation, "num_replicas": 2}
    client.deploy("holder", Holder, array, config=config)
    try:
        found = client.get_handle("holder").remote().result(20)
        assert found[1:] == (1, 1, False)
        (worker,) = pids(dask).values()
        inodes = {each.split()[4] for each in segments_of(worker) if "-" in each.split()[1]}
        assert len(inodes) == 1
        array[-1] = 2
        client.deploy("holder", Holder, array, config=config)
        assert client.get_handle("holder").remote().result(20)[1:] == (1, 2, False)
        os.kill(worker, signal.SIGKILL)
        handle = client.get_handle("holder")
        assert poll_for(lambda: answer(handle), 60)[1:] == (1, 2, False)
    finally:
        client.delete_deployment("holder")
    wait_until_unshared(os.getpid(), *pids(dask).values())


def answer(handle: Any) -> Any:
    """Return the handle's answer; None while replicas are being replaced."""
    try:
        return handle.remote().result(5)
    except (ServeError, TimeoutError):
        return None


@pytest.mark.parametrize("isolation", [pytest.param("thread", marks=pytest.mark.nightly), "process"])
def test_a_killed_caller_leaves_no_memory(dask: Client, client: serve.Client, isolation: str) -> None:
    client.deploy("keeper", Keeper, config={"isolation": isolation})
    try:
        handle = client.get_handle("keeper")
        assert dask.scheduler is not None
        command = [sys.executable, "-c", CALLER, dask.scheduler.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
            try:
                assert caller.stdout is not None
                assert caller.stdout.readline() == "kept\n"
                poll_for(lambda: len(segments_of(caller.pid)) > 2)
            finally:
                caller.send_signal(signal.SIGKILL)
        # Received arrays keep their content.
        assert handle.options(method_name="last").remote().result(20) == [0]
        (worker,) = pids(dask).values()
        assert segments_of(worker)
        handle.options(method_name="drop").remote().result(20)
        wait_until_unshared(os.getpid(), worker)
    finally:
        client.delete_deployment("keeper")


@pytest.mark.nightly
def test_a_killed_worker_leaves_no_memory(dask: Client, client: serve.Client) -> None:
    client.deploy("keeper", Keeper, config={"isolation": "process"})
    handle = client.get_handle("keeper")
    array = np.ones(10 * LARGE_BYTES, np.uint8)
    (worker,) = pids(dask).values()
    calls = [handle.options(method_name="slowly").remote(array) for _ in range(4)]
    poll_for(lambda: segments_of(worker))
    os.kill(worker, signal.SIGKILL)
    failed = 0
    for call in calls:
        try:
            call.result(60)
        except ServeError:
            failed += 1
    assert failed
    del calls, call
    wait_until_unshared(os.getpid())
