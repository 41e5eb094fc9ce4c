"""Strings by name; a reader fetches those that have changed since its last fetch."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class ChangedParts:
    """The newest content of each part, with the number of the update that changed it.

    Readers remember one number, regardless of the number of parts. Removals are not remembered individually:
    a reader that has not seen the last removal gets all parts.

    Parameters
    ----------
    start : int
        Updates are numbered from here. A reader with a lower number, such as one of an earlier controller,
        gets all parts.
    """

    def __init__(self, start: int = 0) -> None:
        self.number = start
        self._removed_at = start + 1
        self._parts: dict[str, tuple[int, str]] = {}

    def names(self) -> list[str]:
        """Return the names of the parts."""
        return list(self._parts)

    def update(self, parts: Mapping[str, str]) -> bool:
        """Set the content of some parts; return whether any has changed."""
        known = self._parts
        changed = {name: text for name, text in parts.items() if name not in known or known[name][1] != text}
        if changed:
            self.number += 1
            known.update({name: (self.number, text) for name, text in changed.items()})
        return bool(changed)

    def keep(self, names: Collection[str]) -> bool:
        """Keep only these parts; return whether any were removed."""
        gone = [name for name in self._parts if name not in names]
        for name in gone:
            del self._parts[name]
        if gone:
            self.number += 1
            self._removed_at = self.number
        return bool(gone)

    def since(self, number: int) -> tuple[bool, dict[str, str]]:
        """Return whether the result has all parts, and the parts changed by updates after ``number``."""
        is_all = number < self._removed_at or number > self.number
        found = self._parts.items()
        return is_all, {name: text for name, (at, text) in found if is_all or at > number}
