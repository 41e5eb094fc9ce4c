"""The versions of deployments' replicas: the version of the code and a mark of the options. Pure.

A replica's version is the only information about the options with which it was started. The version of a
deployment therefore contains a mark of the options that are fixed for the life of a replica. A restart is an
update to the same code, so the number of restarts is a second mark.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

MARK: Final = re.compile(r"\+[0-9a-f]{8}$")
#: Users may not give such versions; see `daskserve.control.decisions.backends`.
RESTARTS: Final = re.compile(r"~restart([0-9]+)$")


def marked(version: str, options: Mapping[str, Any]) -> str:
    """Return a version with a mark of options; equal options have equal marks in every process."""
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    return f"{version}+{digest.hexdigest()[:8]}"


def unmarked(version: str) -> str:
    """Return a version without its marks, if it has any."""
    return MARK.sub("", unrestarted(version))


def restarted(version: str) -> str:
    """Return the version of the replicas after one more restart."""
    found = RESTARTS.search(version)
    return f"{unrestarted(version)}~restart{1 if found is None else int(found[1]) + 1}"


def unrestarted(version: str) -> str:
    """Return a version without the mark of restarts."""
    return RESTARTS.sub("", version)
