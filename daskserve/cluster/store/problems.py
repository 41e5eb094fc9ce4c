"""What could not be read of a store."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from daskserve.types import InstanceName

logger = logging.getLogger("daskserve.store")


class StoreProblems:
    """The problems that the last reading of a store found; each is logged once.

    Attributes
    ----------
    found : mapping
        The reason for each problem, by the name of what could not be read. It is replaced, never changed, so
        any thread may read it.
    """

    def __init__(self, url: str, instance: InstanceName) -> None:
        self._url = url
        self._instance = instance
        self.found: Mapping[str, str] = {}

    def report(self, problems: Mapping[str, str]) -> None:
        """Replace what was found, and log the new problems."""
        for name, reason in problems.items():
            if name not in self.found:
                logger.error("Store %s, instance %s: %s: %s", self._url, self._instance, name, reason)
        self.found = dict(problems)
