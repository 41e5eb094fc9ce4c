"""Chaos runs of some minutes: a proxy, the scheduler, a host and more fail under load, by fixed seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from dask_processes import HERE, Program

CHAOS = HERE / "chaos.py"


@pytest.fixture(autouse=True)
def limit() -> None:
    """Allow this test more time: it waits for its program with a separate deadline."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments",
    [
        # A proxy is stopped, a worker retired, the scheduler killed, a host cut off in a redeploy.
        "--minutes 0.6 --seed 4",
        # One machine after the other is cut off or stops, and each kind of process gets SIGTERM.
        "--minutes 1.2 --seed 4 --alone --only",
    ],
)
def test_a_minute_of_chaos_breaks_no_promise(arguments: str, tmp_path: Path) -> None:
    only = ["stop worker,cut,cut off host,sigterm"] if arguments.endswith("--only") else []
    program = Program([str(CHAOS), *arguments.split(), *only], tmp_path)
    try:
        status = program.wait(160)
    finally:
        if program.process.poll() is None:
            program.process.terminate()  # which removes its machines
            program.process.wait(20)
        program.kill()
    if "nothing was tried" in program.output:
        pytest.skip(program.output)
    assert status == 0, program.output
    assert "All invariants held." in program.output
