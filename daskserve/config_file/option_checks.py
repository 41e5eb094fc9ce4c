"""Checks options against their models, and finds all faults instead of only the first."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from daskserve.config_file.places import Path
from daskserve.config_file.references import has_references
from daskserve.options.fields.base import Options, names_of, spellings_of

#: Maximum number of characters of an invalid value in an error.
SHOWN = 60
_NOTHING: Any = object()
_ALL_OPTIONS = re.compile(r"; \w+\.model_fields has all\.?$")


def faults_of(
    model: type[Options], values: Mapping[str, Any], *, are_written: bool = False
) -> list[tuple[Path, str]]:
    """Return all faults of options, each with the path of its value.

    Pydantic does not compare the values of a model with each other while one of them is invalid. So invalid
    values are removed, and the others are validated again. Values with references to variables are not known
    yet, so they are removed, and do not count as missing. With ``are_written``, they are kept, because the
    model describes options as written in the file.
    """
    unknown: set[Path] = set()
    left = dict(values) if are_written else _known(model, values, (), unknown)
    found: list[tuple[Path, str]] = []
    while True:
        try:
            model(**left)
            return found
        except ValidationError as error:
            errors = [_place_and_text(each) for each in error.errors(include_url=False)]
        except (TypeError, ValueError, NotImplementedError) as error:
            errors = [((), str(error))]
        removed = []
        for loc, text in errors:
            paths = _given(model, left, loc, text)
            if not any(loc == path[:-1] and names(text, path) for path in unknown):
                found.append((paths[0], text))
            removed += paths
        for path in removed:
            _remove(left, path)
        if () in removed:
            return found


def text_of(error: ValidationError) -> str:
    """Return the errors in options, one per line: the option, the reason and the value."""
    found = [_place_and_text(each) for each in error.errors(include_url=False)]
    return "\n".join(
        text if names(text, path) else f"{'.'.join(map(str, path))}: {text}" for path, text in found
    )


def without_nulls(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without nulls where null is not a valid value; these count as not given."""
    spellings = spellings_of(model)

    def cannot_be(name: str) -> bool:
        field = model.model_fields.get(spellings.get(name, name))
        return (
            field is not None and field.default is not None and type(None) not in get_args(field.annotation)
        )

    return {name: value for name, value in values.items() if value is not None or not cannot_be(name)}


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a "did you mean" question with the most similar known name; empty if no name is similar."""
    similar = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def _known(model: type[BaseModel], values: Mapping[str, Any], path: Path, unknown: set[Path]) -> Any:
    """Return options without those that have references, and add the paths of these to ``unknown``."""
    spellings, found = spellings_of(model), {}
    for name, value in values.items():
        field = model.model_fields.get(spellings.get(name, name))
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        inner = next((each for each in kinds if isinstance(each, type) and issubclass(each, Options)), None)
        if inner is not None and isinstance(value, Mapping):
            found[name] = _known(inner, value, (*path, name), unknown)
        elif has_references(value):
            unknown.add((*path, name))
        else:
            found[name] = value
    return found


def _place_and_text(error: Any) -> tuple[tuple[int | str, ...], str]:
    if error["type"] == "missing":
        return error["loc"][:-1], f"{error['loc'][-1]} is missing"
    text = _ALL_OPTIONS.sub("", str(error["msg"]).removeprefix("Value error, "))
    given = error["input"]
    if text.startswith("Input should") and not isinstance(given, (dict, list, tuple)):
        text += f", got {shortened(given)}"
    return error["loc"], text


def shortened(value: Any) -> str:
    """Return a value as an error shows it, shortened."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _given(model: type[BaseModel], values: Any, loc: tuple[int | str, ...], text: str) -> list[Path]:
    """Return the paths of the given values that an error is about, found by its location and its text."""
    path: Path = ()
    for each in loc:
        name = each if path else _spelling(model, values, each)
        inside = _item(values, name)
        if inside is _NOTHING:
            break
        values, path = inside, (*path, name)
    if isinstance(values, Mapping) and len(path) >= len(loc):
        # An error about several values is shown at the first value that it names.
        named = sorted((found.start(), name) for name in values if (found := _word(name).search(text)))
        if named:
            return [(*path, name) for _, name in named]
    return [path]


def _item(values: Any, name: int | str) -> Any:
    if isinstance(values, Mapping):
        return values.get(name, _NOTHING)
    is_index = isinstance(values, (list, tuple)) and isinstance(name, int) and name < len(values)
    return values[name] if is_index else _NOTHING


def _word(name: Any) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(str(name))}(?!\w)")


def names(text: str, path: Path) -> bool:
    """Return whether an error's text names the option that it is about."""
    return not path or _word(path[-1]).search(text) is not None


def _spelling(model: type[BaseModel], values: Any, name: int | str) -> int | str:
    if not isinstance(values, Mapping) or name in values:
        return name
    spellings = spellings_of(model)
    own = spellings.get(str(name), str(name))
    return next(
        (each for each in names_of(model) if spellings.get(each, each) == own and each in values), name
    )


def _remove(values: Any, path: Path) -> None:
    """Remove the innermost value on a path that is an item of a mapping."""
    holder, key = values, None
    for index, each in enumerate(path):
        if not isinstance(values, dict):
            break
        holder, key = values, path[index]
        values = values.get(each)
    if key is not None:
        holder.pop(key, None)
