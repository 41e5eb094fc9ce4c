"""A stopped process, and machines that reach the scheduler but not each other, under a steady load."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dask_processes import Program, poll_for
from machines import Machines, machines
from mixed_load import Request, has_each_client_ended_one, last_status, read_requests

#: The kinds of requests that replicas on both machines can take, and all kinds.
SPREAD = ("GET", "POST", "call")
ALL = (*SPREAD, "GET far", "call far")


@dataclass
class Stage:
    """The controller is on a machine of its own; the load comes from the one that has the near replica."""

    machines: Machines
    load: Program
    far: Program

    def requests(self, since: float = 0.0) -> list[Request]:
        return [each for each in read_requests(self.load.output) if each.began >= since]

    def wait_until_all_go_on(self, since: float, kinds: tuple[str, ...], timeout_s: float) -> None:
        poll_for(
            lambda: has_each_client_ended_one(self.requests(), since, kinds),
            timeout_s,
            what=self.load.report,
            every_s=0.2,
        )

    def wait_for_status(self, is_as_wanted: Callable[[dict[str, Any]], bool]) -> None:
        def look() -> bool:
            status = last_status(self.load.output)
            return bool(status) and is_as_wanted(status)

        poll_for(look, 30, what=self.load.report, every_s=0.2)

    def route_to_far(self, status: dict[str, Any]) -> str | None:
        """Return the route from the near to the far worker, as the status has it; None if it is direct."""
        near, far = (f"tcp://{self.machines.addresses[name]}:" for name in ("near", "far"))
        found = [
            route
            for worker, routes in status["broken_routes"].items()
            for other, route in routes.items()
            if worker.startswith(near) and other.startswith(far)
        ]
        return found[0] if found else None


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    try:
        made = machines("hub", "near", "far")
        found = made.__enter__()
    except OSError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    try:
        with (
            found.scheduler("hub", tmp_path) as address,
            found.worker("hub", address, tmp_path),
            found.worker("near", address, tmp_path, "--resources", "spread=1"),
            found.worker("far", address, tmp_path, "--resources", "spread=1 far=1") as far,
        ):
            arguments = [address, str(tmp_path), found.addresses["near"], "2"]
            load = found.program("near", "mixed_load", arguments, tmp_path)
            try:
                stage = Stage(found, load, far)
                stage.wait_until_all_go_on(0, ALL, 40)
                yield stage
                (tmp_path / "stop").touch()
                assert load.wait(30) == 0, load.report()
            finally:
                load.kill()
    finally:
        made.__exit__(None, None, None)


@pytest.mark.nightly
def test_nobody_waits_long_for_a_stopped_process_or_a_cut_between_two_machines(stage: Stage) -> None:
    began = time.monotonic()
    os.kill(stage.far.process.pid, signal.SIGSTOP)
    try:
        # Three missed answers, and then what was under way there ends.
        stage.wait_until_all_go_on(began + 5, SPREAD, 12)
    finally:
        os.kill(stage.far.process.pid, signal.SIGCONT)
    found = [each for each in stage.requests(began) if each.kind in SPREAD]
    assert all(each.is_good for each in found if each.kind == "GET")
    assert {each.outcome for each in found if each.kind == "POST"} <= {"200", "502"}
    assert max(each.took_s for each in found) < 10, "4 s, and what a busy machine adds"
    stage.wait_for_status(lambda status: not status["unresponsive_workers"])
    stage.wait_until_all_go_on(time.monotonic(), ALL, 20)

    # Packets of one direction are lost, so that the other machine is still heard.
    began = time.monotonic()
    stage.machines.cut("near", "far")
    stage.wait_for_status(lambda status: stage.route_to_far(status) == "scheduler")
    noticed = time.monotonic()
    assert noticed - began < 11, "at most 7 s, and the period of the looks and of the status"
    for _ in range(3):
        stage.wait_until_all_go_on(time.monotonic(), ALL, 5)
    assert max(each.took_s for each in stage.requests(began)) < 9
    after = stage.requests(noticed)
    assert all(each.is_good for each in after), after
    assert max(each.took_s for each in after) < 3
