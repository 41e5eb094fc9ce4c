"""TOML as plain values with their places.

`tomllib` reads the values, and raises an error if the text is not TOML, but does not return their places. So
a text that it accepts is scanned a second time, only for keys and values.
"""

from __future__ import annotations

import re
import tomllib
from datetime import date, datetime, time
from typing import Any

from daskserve.config_file.places import Document, Faults, Lines, Path, Place

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:\\.|[^"\\])*"|' r"'[^']*'", re.DOTALL
)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_VALUE = re.compile(r"[^,\]}\n#]+")
_ERROR_PLACE = re.compile(r" \(at line (\d+), column (\d+)\)$")
_ERROR_END = " (at end of document)"


def parse_toml(text: str, faults: Faults) -> Document:
    """Return the document of a text; record its errors."""
    text = text.replace("\r\n", "\n")
    try:
        value = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # raises ValueError for a number with too many digits
        message = str(error)
        found = _ERROR_PLACE.search(message)
        lines = text.splitlines() or [""]
        place = Place(int(found[1]), int(found[2])) if found else Place(len(lines), len(lines[-1]) + 1)
        problem = _ERROR_PLACE.sub("", message).removesuffix(_ERROR_END)
        faults.add(place, f"this is not TOML: {problem}")
        return Document()
    scan = _Scan(text)
    scan.run()
    scan.document.values.append(_plain(value))
    return scan.document


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, (date, datetime, time)) else value


class _Scan:
    """Finds the places in a text that is known to be TOML."""

    def __init__(self, text: str) -> None:
        self.document = Document()
        self._text = text
        self._index = 0
        self._lines = Lines(text)
        self._tables: dict[Path, int] = {}

    def run(self) -> None:
        """Scan the whole text."""
        root: Path = (0,)
        table = root
        self.document.put(root, Place(1, 1))
        self._skip(_BLANK)
        while self._index < len(self._text):
            if self._text[self._index] == "[":
                table = self._header(root)
            else:
                self._entry(table)
            self._skip(_BLANK)

    def _header(self, root: Path) -> Path:
        is_array = self._text.startswith("[[", self._index)
        self._index += 1 + is_array
        path, place = self._key(root)
        if is_array:
            self._tables[path] = self._tables.get(path, -1) + 1
            self.document.put((*path, self._tables[path]), place)
        self._index = self._text.index("]", self._index) + 1 + is_array
        return self._innermost(path)

    def _innermost(self, path: Path) -> Path:
        """Return the path of an array's last table, for the path of an array of tables."""
        return (*path, self._tables[path]) if path in self._tables else path

    def _entry(self, table: Path) -> None:
        path, place = self._key(table)
        self._index = self._text.index("=", self._index) + 1
        self._skip(_BLANK)
        self._value(path, place)

    def _key(self, table: Path) -> tuple[Path, Place]:
        """Return the path and the place of a dotted key that begins here."""
        path = table
        while True:
            self._skip(_BLANK)
            place = self._place()
            quoted = _STRING.match(self._text, self._index)
            found = quoted or _BARE_KEY.match(self._text, self._index)
            assert found is not None
            self._index = found.end()
            name = tomllib.loads(f"{found[0]} = 0") if quoted else {found[0]: 0}
            path = (*self._innermost(path), *name)
            if not self.document.has(path):
                self.document.put(path, place, place)
            self._skip(_BLANK)
            if not self._text.startswith(".", self._index):
                return path, place
            self._index += 1

    def _value(self, path: Path, key: Place | None) -> None:
        self.document.put(path, self._place(), key)
        opening = self._text[self._index]
        if opening in "[{":
            self._index += 1
            count = 0
            self._skip(_BLANK)
            while self._text[self._index] not in "]}":
                if opening == "[":
                    self._value((*path, count), None)
                else:
                    self._entry(path)
                count += 1
                self._skip(_BLANK)
                if self._text[self._index] == ",":
                    self._index += 1
                    self._skip(_BLANK)
            self._index += 1
            return
        found = _STRING.match(self._text, self._index) or _BARE_VALUE.match(self._text, self._index)
        assert found is not None
        self._index = found.end()

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._index)
        assert found is not None
        self._index = found.end()

    def _place(self) -> Place:
        return self._lines.place(self._index)
