"""User programs that reach only the scheduler, which splices their channels."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from cut_off import MIB, Caller, cut_off_caller
from dask_processes import ExternalCluster, dask_worker, poll_for, within
from tornado.iostream import IOStream

from daskserve.cluster.scheduler.splice import LARGE_BYTES, _carry_bytes


@pytest.fixture(scope="module")
def caller(clean_cluster: ExternalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """Yield a program that has deployed ``m`` on one worker."""
    with cut_off_caller(clean_cluster.address, tmp_path_factory.mktemp("caller")) as caller:
        assert caller.ask("deploy", "m", ["worker-0"], 1) == ["RUNNING"]
        yield caller


def splices(dask_scheduler: Any) -> int:
    return list(dask_scheduler._comms.values()).count("daskserve_splice")


def channels(dask_worker: Any) -> int:
    return list(dask_worker._comms.values()).count("daskserve_channel")


def noop() -> None:
    """Do nothing on the scheduler, to measure its response time."""


def test_calls_work_and_an_unreachable_worker_is_dialled_once(caller: Caller) -> None:
    assert caller.ask("call", "m", 41) == 42
    assert len(caller.ask("refused")) == 1


def test_a_generator_yields_in_order_through_a_splice(caller: Caller) -> None:
    assert caller.ask("items", "m", 1000) == list(range(1000))


@pytest.mark.smoke
def test_arrays_pass_through_a_splice_unchanged(caller: Caller) -> None:
    assert caller.ask("arrays", "m", 16, 1) == 1


def test_the_scheduler_responds_while_many_large_calls_pass(
    caller: Caller, clean_cluster: ExternalCluster
) -> None:
    number = caller.begin("arrays", "m", 2, 64)
    taken_s: list[float] = []
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(caller.answer(number, 60)))
    thread.start()
    while thread.is_alive():
        started = time.monotonic()
        clean_cluster.client.run_on_scheduler(noop)
        taken_s.append(time.monotonic() - started)
    thread.join()
    assert answers == [64]
    assert statistics.median(taken_s) < 0.05
    assert max(taken_s) < 2  # with a margin for a busy machine


def test_a_cancelled_call_is_cancelled_in_the_replica(caller: Caller) -> None:
    caller.ask("begin_waiting", "m")
    poll_for(lambda: caller.ask("ask_model", "m", "counts") == [1, 0])
    caller.ask("cancel_waiting")
    assert caller.ask("outcome")[0] == "RequestCancelledError"
    poll_for(lambda: caller.ask("ask_model", "m", "counts") == [1, 1])


def test_a_slow_reader_blocks_the_stream(caller: Caller, clean_cluster: ExternalCluster) -> None:
    """The reader stops midway: only one window of the replica's answer is ever in flight."""
    scheduler = psutil.Process(clean_cluster.client.run_on_scheduler(os.getpid))
    before = scheduler.memory_info().rss
    assert caller.ask("read_some", "endless", 64) < 65 * MIB
    assert scheduler.memory_info().rss - before < 16 * MIB


@pytest.mark.smoke
def test_a_lost_worker_fails_only_begun_requests(
    caller: Caller, clean_cluster: ExternalCluster, tmp_path: Path
) -> None:
    with dask_worker(clean_cluster.address, tmp_path, name="short-lived") as worker:
        poll_for(lambda: len(clean_cluster.client.scheduler_info(n_workers=-1)["workers"]) == 3)
        assert caller.ask("deploy", "lost", ["short-lived"], 1) == ["RUNNING"]
        caller.ask("begin_waiting", "lost")
        poll_for(lambda: caller.ask("ask_model", "lost", "counts")[0] == 1)
        os.kill(worker.process.pid, signal.SIGKILL)
        with within(5):
            name, begun, _ = caller.ask("outcome")
        assert (name, begun) == ("ActorLostError", True)
    assert caller.ask("call", "m", 1) == 2
    poll_for(lambda: clean_cluster.client.run_on_scheduler(splices) <= 2)


@pytest.mark.nightly
def test_nothing_is_left_when_the_dask_client_is_closed(
    clean_cluster: ExternalCluster, tmp_path: Path
) -> None:
    """The program continues to run; its instance ends after the grace period."""
    before = clean_cluster.client.run_on_scheduler(splices)
    with cut_off_caller(clean_cluster.address, tmp_path) as caller:
        caller.ask("deploy", "short", None, 2)
        assert caller.ask("call", "short", 1) == 2
        assert clean_cluster.client.run_on_scheduler(splices) > before
        caller.ask("close")
        poll_for(lambda: clean_cluster.client.run_on_scheduler(splices) == before, 2)


# ---- forwarding


@contextmanager
def stream_pair() -> Iterator[tuple[IOStream, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.settimeout(5)
    stream = IOStream(near)
    try:
        yield stream, far
    finally:
        stream.close()
        far.close()


def fill(sock: socket.socket) -> int:
    """Send until the socket accepts no more; return the number of bytes sent."""
    sock.setblocking(False)
    count = 0
    try:
        while True:
            count += sock.send(bytes(64 * 1024))
    except BlockingIOError:
        return count


def test_bytes_are_read_only_as_fast_as_they_are_accepted() -> None:
    async def main() -> None:
        with stream_pair() as (source, sender), stream_pair() as (sink, taker):
            carrying = asyncio.create_task(_carry_bytes(source, sink))
            sent = fill(sender)
            kernel_bytes = 2 * sent  # the kernel buffers on both sides of the splice
            for _ in range(100):
                await asyncio.sleep(0)
                sent += fill(sender)
            assert sent <= kernel_bytes + 2 * LARGE_BYTES
            assert not carrying.done()
            sender.close()
            taker.setblocking(False)
            count = 0
            while not carrying.done() or count < sent:
                try:
                    count += len(taker.recv(1 << 20))
                except BlockingIOError:
                    await asyncio.sleep(0)
            assert count == sent  # including the bytes in flight when the sender closed

    asyncio.run(main())
