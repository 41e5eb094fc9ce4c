"""A minute of chaos: a proxy, the scheduler, a host and more fail under load, by a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from dask_processes import HERE, Program

CHAOS = HERE / "chaos.py"
#: When the last faults begin: a proxy is stopped, a worker retired, the scheduler killed, a host cut off in a
#: redeploy.
MINUTES, SEED = "0.6", "4"


@pytest.fixture(autouse=True)
def limit() -> None:
    """Allow this test more time than others: it waits for its program with a deadline of its own."""


@pytest.mark.nightly
def test_a_minute_of_chaos_breaks_no_promise(tmp_path: Path) -> None:
    program = Program([str(CHAOS), "--minutes", MINUTES, "--seed", SEED], tmp_path)
    try:
        status = program.wait(110)
    finally:
        if program.process.poll() is None:
            program.process.terminate()  # which removes its machines
            program.process.wait(20)
        program.kill()
    if "nothing was tried" in program.output:
        pytest.skip(program.output)
    assert status == 0, program.output
    assert "All invariants held." in program.output
