"""Versions of models, and their download from a file system that is elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import dask.config
import fsspec
import pytest

from daskserve.data.replica.models import fetched
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
