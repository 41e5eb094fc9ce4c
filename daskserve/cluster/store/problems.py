"""The problems of a store: records that could not be read, and the loss of its file or folder."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from daskserve.common.types import InstanceName
from daskserve.errors import StoreLostError

logger = logging.getLogger("daskserve.store")


class StoreProblems:
    """The problems that the last reading of a store found; each is logged once.

    Attributes
    ----------
    found : mapping
        The reason for each problem, by the name of the unreadable record or object. It is replaced, never
        changed, so any thread may read it.
    lost : str
        Why the next start would not open the file or folder that the store writes to; empty if it would.
    """

    def __init__(self, url: str, instance: InstanceName) -> None:
        self._url = url
        self._instance = instance
        self.found: Mapping[str, str] = {}
        self.lost = ""

    def report(self, problems: Mapping[str, str]) -> None:
        """Replace the known problems, and log the new ones."""
        for name, reason in problems.items():
            if name not in self.found:
                logger.error("Store %s, instance %s: %s: %s", self._url, self._instance, name, reason)
        self.found = dict(problems)

    def settle(self, written: Collection[str]) -> None:
        """Forget the problems of records that have been rewritten."""
        if self.found and not self.found.keys().isdisjoint(written):
            self.found = {name: reason for name, reason in self.found.items() if name not in written}

    def check_place(self, lost: str, *, must_last: bool) -> None:
        """Record whether the store is lost, and why; if it is, raise an error for a change that must be
        durable.

        Raises
        ------
        StoreLostError
            The message names the remedy.
        """
        if lost != self.lost:
            if lost:
                logger.error(
                    "The records of instance %s in store %s are lost: %s", self._instance, self._url, lost
                )
            else:
                logger.info(
                    "The records of instance %s in store %s are available again", self._instance, self._url
                )
            self.lost = lost
        if lost and must_last:
            raise StoreLostError(
                f"The next start could not open the records of the store {self._url}: {lost}. The change "
                "was refused. Rewrite the records with client.rewrite_store(), or the command daskserve "
                "rewrite-store."
            )

    def all(self) -> dict[str, str]:
        """Return all problems by name, for the status."""
        lost = f"Changes are refused: {self.lost}. Call client.rewrite_store()."
        return {**self.found, **({"store": lost} if self.lost else {})}
