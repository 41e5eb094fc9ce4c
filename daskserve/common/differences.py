"""The differences between two versions of an application, as strings for people, without secrets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes
    ----------
    deployment : str
        Empty for the application itself.
    what : str
        ``created``, ``removed``, ``code``, ``route``, or the name of an option.
    old, new : str
        Empty if there is nothing to show.
    """

    deployment: str
    what: str
    old: str = ""
    new: str = ""

    def __str__(self) -> str:
        before = f"{self.deployment}: " if self.deployment else ""
        if self.what in ("created", "removed"):
            return f"{before}{self.what}"
        values = f" {self.old or 'none'} -> {self.new or 'none'}" if self.old or self.new else ""
        return f"{before}{self.what}{values}"
