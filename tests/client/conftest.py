"""An instance in this process with an HTTP proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import daskserve as serve
from daskserve.testing import local_instance


@pytest.fixture
def client() -> Iterator[serve.Client]:
    with local_instance(http_options={"port": 0}) as client:
        yield client


@pytest.fixture
def url(client: serve.Client) -> str:
    """Return the URL of the instance's only proxy."""
    (only,) = client.http_urls()
    return only
