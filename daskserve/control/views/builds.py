"""The status of applications that are being built from their configurations. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.control.records.state import State


def with_builds(
    state: State, applications: dict[str, dict[str, Any]], waiting: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the status of applications, including those that are being built."""
    for name, record in state.declared.configs.items():
        if record.is_settled:
            continue
        known = applications.setdefault(
            name,
            {
                "message": "",
                "last_deployed_time_s": record.declared_at,
                "route_prefix": record.config.get("route_prefix", "/"),
                "deployments": {},
            },
        )
        if known.get("status") != "DELETING":
            known["status"] = "DEPLOYING"
            known["message"] = waiting.get(name, "") or "It is being built."
    return applications
