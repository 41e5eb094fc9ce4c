"""Texts as plain values, each with its place in the text: YAML, JSON and TOML."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from daskserve.errors import ConfigFileError

#: The path of a value: keys of mappings and indices of lists.
Path: TypeAlias = tuple[str | int, ...]
#: How deep values may be nested, and how many there may be once all aliases are resolved.
MAX_DEPTH = 100
MAX_VALUES = 200_000


class Place(NamedTuple):
    """A line and a column, both from 1."""

    line: int
    column: int


class Lines:
    """Finds the place of a character in a text."""

    def __init__(self, text: str) -> None:
        self._starts = [0, *(found.end() for found in re.finditer("\n", text))]

    def place(self, index: int) -> Place:
        """Return the place of the character at an index."""
        line = bisect_right(self._starts, index)
        return Place(line, index - self._starts[line - 1] + 1)


@dataclass
class Faults:
    """The faults and warnings of a file, each with its place."""

    name: str
    found: dict[tuple[Place, str], None] = field(default_factory=dict)
    warnings: dict[tuple[Place, str], None] = field(default_factory=dict)

    def add(self, place: Place, text: str) -> None:
        """Add a fault."""
        self.found[place, " ".join(text.split())] = None

    def warn(self, place: Place, text: str) -> None:
        """Add a warning."""
        self.warnings[place, " ".join(text.split())] = None

    def lines(self, kind: Mapping[tuple[Place, str], None]) -> list[str]:
        """Return errors or warnings as lines, in the order of their places."""
        return [f"{self.name}:{place.line}:{place.column}: {text}" for place, text in sorted(kind)]

    def check(self) -> None:
        """Raise `ConfigFileError` with all faults, if there are any."""
        if self.found:
            raise ConfigFileError("\n".join(self.lines(self.found)))


@dataclass
class Document:
    """The values of one text.

    Attributes
    ----------
    values : list
        The value of each document in the text; YAML may have several. A path begins with the index.
    """

    values: list[Any] = field(default_factory=list)
    _places: dict[Path, Place] = field(default_factory=dict)
    _keys: dict[Path, Place] = field(default_factory=dict)

    def put(self, path: Path, place: Place, key: Place | None = None) -> None:
        """Record the places of a value and of its key."""
        self._places[path] = place
        if key is not None:
            self._keys[path] = key

    def at(self, path: Sequence[str | int]) -> Place:
        """Return the place of a value, or of the innermost enclosing value that is in the text."""
        found = tuple(path)
        while found and found not in self._places:
            found = found[:-1]
        return self._places.get(found, Place(1, 1))

    def key_at(self, path: Sequence[str | int]) -> Place:
        """Return the place of a value's key, or of the value if it has no key; see `at`."""
        found = self._keys.get(tuple(path))
        return self.at(path) if found is None else found

    def has(self, path: Sequence[str | int]) -> bool:
        """Whether the text has a value at a path."""
        return tuple(path) in self._places
