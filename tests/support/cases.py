"""Names the case of a table that a test loops over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def case(*values: Any) -> Iterator[None]:
    """Add the case to the error that a test fails with."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case of {', '.join(map(repr, values))}")
        raise
