"""Runs the blocks of the README that need processes, as readers do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dask_processes import ExternalCluster, Program, fetch, poll_for, wait_until_gone
from ports import free_port

README = Path(__file__).parent.parent.parent / "README.md"
GREETINGS = ["Hello, Python!", "Hello, HTTP!"]


@pytest.fixture(scope="module")
def port() -> int:
    """Return a free port; the default port may be taken on this machine."""
    return free_port()


@pytest.fixture(scope="module")
def block(port: int) -> str:
    found = re.search(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    source = found.group(1)
    assert source.count("127.0.0.1:8000") == 1
    return source.replace("127.0.0.1:8000", f"127.0.0.1:{port}")


def run(
    command: list[str], folder: Path, port: int, *, stdin: str | None = None, workers: int = 1
) -> Program:
    """Run a program to its end, and check its output and that it leaves no process."""
    variables = {
        "DASK_DASKSERVE__HTTP__PORT": str(port),
        "DASK_DASKSERVE__LOCAL_CLUSTER__N_WORKERS": str(workers),
    }
    program = Program(command, folder, stdin=stdin, environment=variables)
    try:
        program.wait_for_line(GREETINGS[0])
        started = program.descendants()
        assert program.wait() == 0, program.report()
        wait_until_gone(started, 5)
    finally:
        program.kill()
    return program


#: Runs the block in the main module while an event loop runs in the same thread, as a cell of a notebook.
CELL = """
import asyncio, sys, types

shell = types.SimpleNamespace(kernel=None)
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)

async def run_cell():
    exec(compile({block!r}, "cell", "exec"), globals())

asyncio.run(run_cell())
"""


@pytest.mark.smoke
def test_the_block_runs_as_a_script(block: str, port: int, tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text(block)
    program = run([str(script)], tmp_path, port, workers=2)
    assert (program.output.splitlines(), program.errors) == (GREETINGS, "")


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["standard input", "REPL", "notebook cell"])
def test_the_block_runs_elsewhere(how: str, block: str, port: int, tmp_path: Path) -> None:
    """In a REPL it is pasted line by line; an empty line ends a block."""
    commands = {
        "standard input": ["-"],
        "REPL": ["-q", "-i"],
        "notebook cell": ["-c", CELL.format(block=block)],
    }
    program = run(commands[how], tmp_path, port, stdin=None if how == "notebook cell" else block)
    lines = program.output.splitlines()
    if how == "notebook cell":  # which gets the address of the page, too
        assert lines.pop(0).startswith("Watch it at http://")
    assert lines == GREETINGS
    assert re.sub(r">>> |\.\.\. ", "", program.errors).split() == [], program.errors


def test_the_block_for_a_cluster_serves_until_ctrl_c(
    external: ExternalCluster, port: int, tmp_path: Path
) -> None:
    (source,) = re.findall(
        r"^```python\n(from distributed .*?)^```$",
        README.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    script = tmp_path / "greet.py"
    script.write_text(source.replace("tcp://scheduler:8786", external.address))
    program = Program([str(script)], tmp_path, environment={"DASK_DASKSERVE__HTTP__PORT": str(port)})
    try:
        poll_for(lambda: "Serving at" in program.output, what=program.report)
        assert fetch(f"http://127.0.0.1:{port}/?name=cluster").text == "Hello, cluster!"
        program.interrupt()
        assert program.wait() == 0, program.report()
    finally:
        program.kill()
    external.assert_clean()
