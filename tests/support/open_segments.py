"""Counts the open shared memory of this process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_segments() -> int:
    """Return how many descriptors of this process lead to segments."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += "memfd:daskserve" in os.readlink(each)
    return found
