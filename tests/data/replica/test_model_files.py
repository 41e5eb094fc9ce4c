"""Versions of models, and their download from a remote file system."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from pathlib import Path

import dask.config
import fsspec
import pytest

from daskserve.common.clock import LoopClock
from daskserve.context import LoadedModels
from daskserve.data.replica import models as models_module
from daskserve.data.replica.models import ReplicaModels, fetched
from daskserve.data.replica.user_code.servable import Servable
from daskserve.errors import RequestTimeoutError
from daskserve.payload.model_files import list_models, newest_last


def download(name: str, version: str) -> str:
    path, held = fetched("memory://bucket", name, version)
    assert held is not None
    os.close(held)
    return path


def test_versions_are_ordered_as_numbers() -> None:
    assert newest_last(["²", "1"]) == ["1", "²"]  # a digit, but no number
    assert newest_last(["10", "9", "v1.10", "v1.9", "2024-12-01"]) == [
        "9",
        "10",
        "2024-12-01",
        "v1.9",
        "v1.10",
    ]


def test_a_bucket_is_listed_and_a_version_downloaded_once(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    for name in ("m/9/weights", "m/10/a/deep", "m/10/weights", "_hidden/1/x", "m/.tmp/x", "README"):
        files.pipe(f"/bucket/{name}", name.encode())
    try:
        assert list_models("memory://bucket") == {"m": ["9", "10"]}
        with dask.config.set({"daskserve.process.environments-folder": str(tmp_path)}):
            place = Path(download("m", "10"))
            assert (place / "a" / "deep").read_text() == "m/10/a/deep"
            assert download("m", "10") == str(place)
            files.pipe("/bucket/m/10/weights", b"changed")
            again = Path(download("m", "10"))
            assert (again / "weights").read_text() == "changed"
            assert place.parent == tmp_path
            with pytest.raises(FileNotFoundError, match="no folder m/11 in the model repository"):
                fetched("memory://bucket", "m", "11")
    finally:
        files.rm("/bucket", recursive=True)
    with pytest.raises(FileNotFoundError):
        list_models("memory://bucket")


def test_a_local_version_is_used_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    found = f"{tmp_path}/m/1", None
    assert fetched(f"file://{tmp_path}", "m", "1") == fetched(str(tmp_path), "m", "1") == found


async def test_a_download_that_ends_after_its_timeout_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, held = threading.Event(), os.open(tmp_path, os.O_RDONLY)

    def slow(*_: str) -> tuple[str, int]:
        may_end.wait(10)
        return str(tmp_path), held

    monkeypatch.setattr(models_module, "fetched", slow)
    repository = {"url": "memory://bucket", "mode": "explicit", "load_timeout_s": 0.01}
    models = ReplicaModels(LoadedModels(random.Random(0)), repository, LoopClock())

    class Loading:
        def load_model(self, name: str, version: str, path: str) -> None: ...

    servable = Servable(Loading, (), {})
    servable.construct_in_thread()
    wanted = {"m": {"versions": {"1": 0}, "default": "1"}}
    with pytest.raises(RequestTimeoutError, match="were not fetched after"):
        await models.start(object(), servable, wanted)  # type: ignore[arg-type]
    (thread,) = [each for each in threading.enumerate() if each.name == "daskserve-download"]
    may_end.set()
    thread.join()
    for _ in range(4):
        await asyncio.sleep(0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)
