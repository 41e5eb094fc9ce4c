"""A machine that vanishes silently, as after a power loss or with an unplugged cable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from dask_processes import poll_for
from machines import Machines, machines


@pytest.fixture
def two_machines() -> Iterator[Machines]:
    try:
        made = machines("near", "far")
        found = made.__enter__()
    except OSError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    try:
        yield found
    finally:
        made.__exit__(None, None, None)


@pytest.mark.nightly
def test_requests_in_flight_to_a_vanished_machine_do_not_wait_for_tcp(
    two_machines: Machines, tmp_path: Path
) -> None:
    with (
        two_machines.scheduler("near", tmp_path) as address,
        two_machines.worker("near", address, tmp_path),
    ):
        # Makes the call by handle go through the scheduler; HTTP requests go from worker to worker.
        route = {"DASK_DASKSERVE__CHANNEL__ROUTE": "scheduler"}
        program = two_machines.program(
            "near", "vanishing_machine", [address, str(tmp_path)], tmp_path, **route
        )
        try:
            program.wait_for_line("started")
            only_far = ["--resources", "far=1"]
            with two_machines.worker("far", address, tmp_path, *only_far):
                poll_for(lambda: len(list(tmp_path.glob("begun *"))) == 3, what=program.report)
                with two_machines.worker("near", address, tmp_path, *only_far, label="spare"):
                    two_machines.unplug("far")
                    (tmp_path / "go").touch()
                    assert program.wait(40) == 0, program.report()
        finally:
            program.kill()
    lines = [line.removeprefix("answer ") for line in program.output.splitlines() if line[:6] == "answer"]
    answers = {by: (answer, took_s) for by, answer, took_s in map(json.loads, lines)}
    assert answers["GET"][0] == "200 done"
    assert answers["POST"][0].startswith("502 ")
    assert answers["handle"][0].startswith("ActorLostError ")
    # Five seconds of silence, checked once a second, seen twice. TCP alone would take half a minute.
    assert max(took_s for _, took_s in answers.values()) < 15
