"""The connection that code finds in its process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from distributed import Client
from tables import each_case

from daskserve.cluster.worker.current import default_client


@each_case(
    ("status", "is_found"), [("running", True), ("connecting", True), ("closing", False), ("closed", False)]
)
def test_a_client_that_connects_again_is_still_the_default_one(
    status: str, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `serve.run` starts a cluster of its own while the scheduler restarts."""
    client = SimpleNamespace(status=status)
    monkeypatch.setattr(Client, "current", lambda: client)
    assert default_client() is (client if is_found else None)
