"""A machine that vanishes silently, as after a power loss or with an unplugged cable."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from dask_processes import Program, dask_scheduler, dask_worker, poll_for
from vanishing_machine import Machines, machines


@pytest.fixture
def two_machines() -> Iterator[Machines]:
    try:
        made = machines()
        found = made.__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    try:
        yield found
    finally:
        made.__exit__(None, None, None)


def test_requests_in_flight_to_a_vanished_machine_do_not_wait_for_tcp(
    two_machines: Machines, tmp_path: Path
) -> None:
    near, far = two_machines.near, two_machines.far
    near_host, far_host = two_machines.addresses
    on_near, on_far = two_machines.enter(near), two_machines.enter(far)
    with (
        dask_scheduler(tmp_path, prelude=on_near, extra=["--host", near_host]) as address,
        dask_worker(address, tmp_path, prelude=on_near, extra=["--host", near_host]),
    ):
        source = f"{on_near}\nimport sys, runpy\nrunpy.run_module('vanishing_machine', run_name='__main__')"
        # Makes the call by handle go through the scheduler; HTTP requests go from worker to worker.
        route = {"DASK_DASKSERVE__CHANNEL__ROUTE": "scheduler"}
        program = Program(["-c", source, address, str(tmp_path)], tmp_path, environment=route)
        try:
            program.wait_for_line("started")
            only_far = ["--host", far_host, "--resources", "far=1"]
            with dask_worker(address, tmp_path, prelude=on_far, extra=only_far):
                poll_for(lambda: len(list(tmp_path.glob("begun *"))) == 3, what=program.report)
                spare = ["--host", near_host, "--resources", "far=1"]
                with dask_worker(address, tmp_path, prelude=on_near, extra=spare):
                    two_machines.unplug_far()
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
