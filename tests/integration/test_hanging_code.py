"""Real replicas that hang or report that they are unhealthy get no more requests, and are replaced."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from clusters import running
from dask_processes import ExternalCluster, fetch, poll_for

import daskserve as serve

#: Detection within about 1.5 s instead of 35 s.
QUICK = {"health_check_period_s": 0.3, "health_check_timeout_s": 0.3, "health_check_threshold": 2}


class BlocksItsLoop:
    async def __call__(self, request: Any) -> str:
        if request.query_params.get("block"):
            time.sleep(5)  # the fault under test
        return "fine"


class ReportsUnhealthy:
    def __init__(self) -> None:
        self.is_ill = False

    def check_health(self) -> None:
        if self.is_ill:
            raise RuntimeError("feverish")

    def __call__(self, request: Any) -> int:
        self.is_ill = self.is_ill or bool(request.query_params.get("ill"))
        return id(self)


def names(client: serve.Client) -> set[str]:
    return {actor.name for actor in client.status().replicas("b") if actor.state == "RUNNING"}


def provoke(url: str) -> None:
    """Send the request that breaks the replica, and do not wait for its answer."""

    def send() -> None:
        try:
            fetch(url, timeout_s=8)
        except OSError:
            pass

    threading.Thread(target=send, daemon=True).start()


def test_a_replica_with_a_blocked_loop_is_replaced_and_delays_no_other(
    client: serve.Client, url: str, external: ExternalCluster
) -> None:
    workers = len(external.client.scheduler_info(n_workers=-1)["workers"])
    client.create_backend("b", BlocksItsLoop, config=QUICK)
    client.create_endpoint("e", backend="b", route="/e")
    client.create_backend("other", BlocksItsLoop, config={"num_replicas": 2 * workers})
    client.create_endpoint("other", backend="other", route="/other")
    before = names(client)
    assert len(set(running(client, "other"))) == workers, "one of them shares a worker with the blocking one"
    provoke(f"{url}/e?block=1")
    waits: list[float] = []

    def is_replaced() -> bool:
        began = time.monotonic()
        assert fetch(f"{url}/other").text == "fine"
        external.client.run(os.getpid)  # runs on the loops of the workers, like heartbeats
        waits.append(time.monotonic() - began)
        return bool(names(client)) and names(client).isdisjoint(before)

    poll_for(is_replaced, 10)
    assert fetch(f"{url}/e").text == "fine"
    assert len(waits) > 10
    assert max(waits) < 1.5, "far less than the 5 s for which the loop is blocked"


def test_a_replica_that_reports_unhealthy_is_replaced(client: serve.Client, url: str) -> None:
    client.create_backend("b", ReportsUnhealthy, config=QUICK)
    client.create_endpoint("e", backend="b", route="/e")
    first = fetch(f"{url}/e").text
    fetch(f"{url}/e?ill=1")
    poll_for(lambda: fetch(f"{url}/e").text != first, 10)
    assert len(running(client, "b")) == 1


class TextHangs(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        time.sleep(3.5)
        return "late"


class Raises:
    async def __call__(self) -> None:
        raise TextHangs(402)

    async def fine(self) -> str:
        return "fine"


def error_of(response: Any) -> Exception | None:
    """Return the error of a call; `pytest.raises` may show its text."""
    try:
        response.result()
    except Exception as error:
        return error
    return None


def test_an_error_whose_text_hangs_delays_its_own_caller_alone(
    client: serve.Client, external: ExternalCluster
) -> None:
    client.deploy("raises", Raises, config={"event_loop": "worker", "max_concurrent_queries": 1})
    handle = client.get_handle("raises")
    processes = external.client.run(os.getpid)
    failing = handle.remote()
    waits: list[float] = []
    while not failing.done():
        began = time.monotonic()
        assert external.client.run(os.getpid) == processes  # on the loops of the workers, like heartbeats
        waits.append(time.monotonic() - began)
    assert max(waits) < 1.5, "less than the time for which the text hangs"
    error = error_of(failing)
    assert (type(error).__name__, vars(error)["code"]) == ("TextHangs", 402)
    assert handle.options(method_name="fine").remote().result(timeout_s=5) == "fine"  # the slot is free


class HandlerHangs(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.is_released = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.is_released.wait(10)


class LogsToIt:
    def __init__(self) -> None:
        self.handler = HandlerHangs()

    def __call__(self) -> str:
        log = logging.getLogger("hangs")
        log.addHandler(self.handler)
        try:
            log.warning("called")
        finally:
            log.removeHandler(self.handler)
        return "fine"

    def release(self) -> None:
        self.handler.is_released.set()


def test_a_handler_of_logging_that_hangs_delays_no_request(client: serve.Client) -> None:
    client.deploy("logs", LogsToIt, route_prefix=None)
    handle = client.get_handle("logs")
    try:
        assert handle.remote().result(5) == "fine"
    finally:
        handle.release.remote().result(20)
        client.delete_deployment("logs")
