"""Errors in IPython: cells have the names that users see, and tracebacks have no frames of daskserve."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

import daskserve as serve
from daskserve.client.definitions.code_digest import code_digest
from daskserve.internals import ipython
from daskserve.payload.pickling import dump_code
from daskserve.testing import local_instance

MODEL = """import daskserve as serve

def load(path):
    raise FileNotFoundError(path)

@serve.deployment
class Model:
    def __init__(self, path=None):
        if path is not None:
            load(path)

    def __call__(self):
        load("page")
"""


@pytest.fixture
def shell() -> Iterator[Any]:
    """A shell in this process, like a notebook's."""
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    found = interactive.InteractiveShell.instance()
    found.colors = "nocolor"
    try:
        yield found
    finally:
        found.restore_sys_module_state()
        interactive.InteractiveShell.clear_instance()


def shown_by(shell: Any, cell: str) -> str:
    """Return the shell's output for the error of a cell."""
    printed: list[str] = []
    shell._showtraceback = lambda kind, error, lines: printed.extend(lines)
    assert shell.run_cell(cell, store_history=True).error_in_exec is not None
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(printed))


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("serve.run(Model.bind('weights'), name='bad')", "correct the code, and deploy it again"),
        ("serve.run(Model.bind(), route_prefix=None).remote().result()", "FileNotFoundError: page"),
        ("serve.get_app_handle('nobody')", "Application 'nobody' does not exist"),
        (
            "serve.connect().create_backend('classic', Model.definition, 'weights')",
            "Backend 'classic' failed",
        ),
    ],
)
def test_an_error_is_shown_once_with_the_lines_of_the_cells(shell: Any, cell: str, says: str) -> None:
    with local_instance():
        shell.run_cell(MODEL, store_history=True)
        text = shown_by(shell, cell)
    lines = text.splitlines()
    assert len(lines) <= 25, text
    assert says in lines[-1]
    assert "----> 1 serve." in text
    assert "daskserve/" not in text
    if "nobody" not in cell:
        assert re.search(r'File "Cell In\[1\]", line 4, in load\n    raise FileNotFoundError\(path\)', text)
        assert text.count("line 4, in load") == 1


def test_a_cell_that_runs_again_is_the_same_version(shell: Any) -> None:
    digests = set()
    for _ in range(12):  # from In[1] to In[12], whose name is longer
        shell.run_cell(MODEL, store_history=True)
        digests.add(code_digest([dump_code(shell.user_ns["load"]).data]))
    assert len(digests) == 1


def test_without_ipython_nothing_is_changed() -> None:
    text = 'Traceback\n  File "Cell In[1]", line 4, in load\nKeyError'
    assert ipython.cell_name("/tmp/ipykernel_1/2.py") is None
    assert ipython.with_cell_lines(text) == text


def test_a_handle_outside_of_notebooks_does_not_ask_for_short_logs() -> None:
    assert serve.run(serve.deployment(len).bind(), local=True)._facts is None
    serve.shutdown()
