"""Limits of one configuration, so that a mistake in a generated file does not occupy the controller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from daskserve.common import settings


def excess(applications: Iterable[Any]) -> str:
    """Return which limit a configuration exceeds, and the remedy; empty if it exceeds none."""
    known, most = list(applications), settings.controller()
    lists = [each.get("deployments") for each in known if isinstance(each, Mapping)]
    deployments = sum(len(each) for each in lists if isinstance(each, list))
    for what, count, limit in (
        ("applications", len(known), most.max_applications),
        ("deployments", deployments, most.max_deployments),
    ):
        if count > limit:
            return (
                f"the configuration has {count} {what}, and at most {limit} are allowed; split it, and "
                f"deploy the parts with --merge, or raise daskserve.controller.max-{what} in the "
                "configuration of Dask"
            )
    return ""
