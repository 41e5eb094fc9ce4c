"""Fixtures of the channel tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from open_segments import open_segments


@pytest.fixture
def closes_all_segments() -> Iterator[None]:
    """Check that a test leaves no shared memory open."""
    before = open_segments()
    yield
    gc.collect()
    assert open_segments() == before
