"""The models in a folder that fsspec opens, ``NAME/VERSION/...``: their versions and their files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any


def newest_last(versions: Iterable[str]) -> list[str]:
    """Return versions sorted, with numbers in names compared as numbers.

    Examples
    --------
    >>> newest_last(["10", "9", "v1.10", "v1.9"])
    ['9', '10', 'v1.9', 'v1.10']
    """

    def key(version: str) -> list[tuple[int, int, str]]:
        parts = re.split(r"(\d+)", version)
        return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]

    return sorted(versions, key=key)


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, with an empty listings cache, and the path in it."""
    from fsspec.core import url_to_fs  # slow to import, and most processes do not need it

    found, path = url_to_fs(url)
    found.invalidate_cache()
    return found, str(path).rstrip("/")


def list_models(url: str) -> dict[str, list[str]]:
    """Return the versions of each model, the newest last; names that begin with a dot or ``_`` are left out.

    Raises
    ------
    OSError The folder does not exist or cannot be read; file systems may raise other errors.
    """
    files, root = file_system(url)
    found = {name: newest_last(_folders(files, f"{root}/{name}")) for name in _folders(files, root)}
    return {name: versions for name, versions in found.items() if versions}


def _folders(files: Any, path: str) -> list[str]:
    entries = files.ls(path, detail=True)
    names = (
        str(each["name"]).rstrip("/").rpartition("/")[2] for each in entries if each["type"] == "directory"
    )
    return [name for name in names if name and name[0] not in "._"]


def fingerprint(files: Any, path: str) -> str:
    """Return a digest of the names, sizes and times of all files of a version."""
    entries = files.find(path, detail=True)
    facts = sorted(
        f"{name} {each.get('size')} {each.get('ETag') or each.get('mtime') or each.get('LastModified') or ''}"
        for name, each in entries.items()
    )
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:20]


def state_of_version(url: str, name: str, version: str) -> str:
    """Return the `fingerprint` of a version."""
    files, root = file_system(url)
    return fingerprint(files, f"{root}/{name}/{version}")
