"""JSON as plain values with their places.

JSON is not parsed as YAML, because YAML 1.1 reads ``1e5`` as text, refuses tabs, and splits an escaped
character beyond 16 bits in two.
"""

from __future__ import annotations

import json
import re
from typing import Any

from daskserve.config_file.places import MAX_DEPTH, Document, Faults, Lines, Path, Place

_SPACE = re.compile(r"[ \t\r\n]*")


def parse_json(text: str, faults: Faults) -> Document:
    """Return the document of a text; record its errors."""
    reading = _Reading(text, faults)
    try:
        value, end = reading.value(reading.skipped(0), (0,), None)
        if reading.skipped(end) != len(text):
            raise json.JSONDecodeError("Extra data", text, reading.skipped(end))
        reading.document.values.append(value)
    except json.JSONDecodeError as error:
        faults.add(Place(error.lineno, error.colno), f"this is not JSON: {error.msg}")
    return reading.document


class _Reading:
    """Parses a document and records the position of each value. Scalars are decoded by `json`."""

    def __init__(self, text: str, faults: Faults) -> None:
        self.document = Document()
        self._text = text
        self._faults = faults
        self._decoder = json.JSONDecoder()
        self._place = Lines(text).place

    def skipped(self, index: int) -> int:
        """Return the index after the white space at an index."""
        found = _SPACE.match(self._text, index)
        assert found is not None
        return found.end()

    def value(self, index: int, path: Path, key: Place | None) -> tuple[Any, int]:
        """Return the value at an index, and the index after it."""
        self.document.put(path, self._place(index), key)
        if len(path) > MAX_DEPTH:
            raise self._error(f"Values are nested deeper than {MAX_DEPTH} levels", index)
        if self._text[index : index + 1] == "{":
            return self._object(index, path)
        if self._text[index : index + 1] == "[":
            return self._array(index, path)
        try:
            found: tuple[Any, int] = self._decoder.raw_decode(self._text, index)
        except json.JSONDecodeError:
            raise
        except ValueError:  # Python does not parse integers of more than 4,300 digits
            raise self._error("This number has too many digits", index) from None
        return found

    def _object(self, index: int, path: Path) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        first: dict[str, int] = {}
        index = self.skipped(index + 1)
        while self._text[index : index + 1] != "}":
            if first:
                index = self._after(",", index)
            if self._text[index : index + 1] != '"':
                raise self._error("Expecting property name enclosed in double quotes", index)
            place = self._place(index)
            key, index = self._decoder.raw_decode(self._text, index)
            index = self._after(":", self.skipped(index))
            value, index = self.value(index, (*path, key), place)
            index = self.skipped(index)
            if key in first:
                self._faults.add(place, f"the key {key!r} is here already, in line {first[key]}")
                continue
            first[key] = place.line
            found[key] = value
        return found, index + 1

    def _array(self, index: int, path: Path) -> tuple[list[Any], int]:
        found: list[Any] = []
        index = self.skipped(index + 1)
        while self._text[index : index + 1] != "]":
            if found:
                index = self._after(",", index)
            value, index = self.value(index, (*path, len(found)), None)
            found.append(value)
            index = self.skipped(index)
        return found, index + 1

    def _after(self, character: str, index: int) -> int:
        if self._text[index : index + 1] != character:
            raise self._error(f"Expecting {character!r} delimiter", index)
        return self.skipped(index + 1)

    def _error(self, text: str, index: int) -> json.JSONDecodeError:
        return json.JSONDecodeError(text, self._text, index)
