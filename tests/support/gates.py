"""Where user code and the test of it meet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest


class Gates:
    """What both see; definitions that use one of a module are at its top level, pickled by reference."""

    def __init__(self) -> None:
        #: Set when whatever waits in user code may go on.
        self.go = threading.Event()


def anew_for_each_test(gates: Gates) -> Any:
    """Return a fixture, to be given a name in the test's module."""

    @pytest.fixture(autouse=True)
    def _fresh_gates() -> Iterator[None]:
        gates.__init__()  # type: ignore[misc]
        yield
        gates.go.set()  # whatever still hangs there may go

    return _fresh_gates
