"""Events that user code and its test share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest


class Gates:
    """The shared events. Only code at the top level of a module, pickled by reference, can use its gates."""

    def __init__(self) -> None:
        #: Set when waiting user code may continue.
        self.go = threading.Event()


def anew_for_each_test(gates: Gates) -> Any:
    """Return a fixture that resets the gates for each test; give it a name in the test's module."""

    @pytest.fixture(autouse=True)
    def _fresh_gates() -> Iterator[None]:
        gates.__init__()  # type: ignore[misc]
        yield
        gates.go.set()  # releases user code that still waits

    return _fresh_gates
