"""Limits of one configuration, so that a mistake in a generated file does not occupy the controller."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from daskserve.common import settings
from daskserve.config_file.places import Path
from daskserve.options.fields.base import WHOLE_NUMBERS


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


def outsized_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield the path of each whole number that cannot be stored, and the number."""
    if isinstance(value, int):
        if value not in WHOLE_NUMBERS:
            yield path, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from outsized_in(each, (*path, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from outsized_in(each, (*path, index))
