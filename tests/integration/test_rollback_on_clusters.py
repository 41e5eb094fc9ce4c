"""Rollbacks between processes: large constructor arguments are restored, and changed files are refused."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from distributed import Client as DaskClient

import daskserve as serve
from daskserve.errors import ServeError

MODULE = """
class Shop:
    def __call__(self, request=None):
        return {text!r}
"""


def find_modules_in(folder: str) -> None:
    sys.path.insert(0, folder)


def find_nothing_in(folder: str) -> None:
    sys.path.remove(folder)


def forget_module() -> None:
    sys.modules.pop("rollback_shop", None)


class Weights:
    def __init__(self, weights: np.ndarray) -> None:
        self._weights = weights

    def __call__(self, request: object = None) -> tuple[float, int]:
        return float(self._weights[0]), len(self._weights)


def test_large_constructor_arguments_return_with_their_revision(client: serve.Client) -> None:
    application = serve.deployment(Weights).options(name="model")
    for number in (1.0, 2.0):
        client.run(application.bind(np.full(1_000_000, number)), name="large", route_prefix=None)
    assert client.rollback("large") == 1
    assert client.get_app_handle("large").remote().result(10) == (1.0, 1_000_000)
    assert client.history("large").current == 3
    kinds = [each.kind for each in client.events("large")]
    assert kinds[0] == "DEPLOYING"
    assert {"ROLLING_BACK", "ROLLED_BACK", "REPLICA_STARTED"} < set(kinds)
    client.delete_application("large")


def test_a_rollback_does_not_serve_other_files_under_an_old_name(
    client: serve.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers have imported the new file, and only the new file exists."""
    file = tmp_path / "rollback_shop.py"
    monkeypatch.syspath_prepend(tmp_path)
    with DaskClient(client.scheduler_address) as dask:
        dask.run(find_modules_in, str(tmp_path))
        for text in ("old", "new one"):
            file.write_text(MODULE.format(text=text))
            forget_module()
            importlib.import_module("rollback_shop")
            shop = serve.deployment("rollback_shop:Shop").options(name="shop", num_replicas=2)
            client.run(shop.bind(), name="files", route_prefix=None)
        dask.run(forget_module)
        with pytest.raises(ServeError, match="differs from that of the revision to roll back to"):
            client.rollback("files")
        assert client.get_app_handle("files").remote().result(10) == "new one"
        assert [each.state for each in client.history("files").revisions] == [
            *("SUPERSEDED", "RUNNING", "FAILED"),
        ]
        dask.run(find_nothing_in, str(tmp_path))
    client.delete_application("files")
