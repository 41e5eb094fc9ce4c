"""References to environment variables in a configuration: ``${NAME}`` and ``${NAME:-default}``.

Records and the status keep references as they are. The process that uses a value replaces the reference by
the variable's value: for an application, the process that builds it. ``$${NAME}`` is the text ``${NAME}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from daskserve.config_file.masking import HIDING
from daskserve.config_file.model import ApplicationConfig, InstanceConfig
from daskserve.config_file.places import Path
from daskserve.errors import ConfigFileError

_REFERENCE = re.compile(r"\$(?:(\$)(?=\{)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?)")
_WORDS: Mapping[str, bool] = {"true": True, "false": False}
#: The options below which the value of a variable stays a string: values for user code, and secrets.
_TEXTS = frozenset({"args", "user_config", "init_args", "init_kwargs"}) | HIDING.keys()

ConfigT = TypeVar("ConfigT", ApplicationConfig, InstanceConfig)


def _texts_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        if "${" in value:
            yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts_in(each, (*path, str(key)))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _texts_in(each, (*path, index))


def references_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield the path of each string with references, and the string."""
    for where, text in _texts_in(value, path):
        if any(not found[1] for found in _REFERENCE.finditer(text)):
            yield where, text


def not_references_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield the path of each string with an incomplete reference, and that reference."""
    for where, text in _texts_in(value, path):
        rest = _REFERENCE.sub("", text)
        if "${" in rest:
            yield where, re.split(r"(?<=\})|\s", rest[rest.index("${") :], maxsplit=1)[0]


def has_references(value: Any) -> bool:
    """Whether a value contains references, at any depth."""
    return next(references_in(value), None) is not None


def slashed(path: Path) -> str:
    """Return a path as a string, as it is written in ``references``."""
    return "/".join(map(str, path))


def resolved(config: ConfigT, variables: Mapping[str, str]) -> ConfigT:
    """Return a configuration with the values of variables in place of its references.

    Applications within an instance's configuration keep their references.

    Raises
    ------
    ConfigFileError
        There is no such variable in this process. The message names each one, and its place in the file.
    """
    missing: dict[str, None] = {}

    def value_of(path: Path, text: str) -> Any:
        def replacement(found: re.Match[str]) -> str:
            if found[1]:
                return "$"
            name, default = found[2], found[3]
            value = variables.get(name) or default
            if value is None and name not in variables:
                where = config.references.get(slashed(path), ".".join(map(str, path)))
                missing[
                    f"{where}: there is no environment variable {name!r} in the process that reads it; set "
                    f"it there, or give a default: ${{{name}:-default}}"
                ] = None
            return value or ""

        found = _REFERENCE.sub(replacement, text)
        is_whole = _REFERENCE.fullmatch(text) is not None
        return found if _TEXTS.intersection(path) or not is_whole else _scalar(found)

    plain = config.to_plain()
    kept = {name: plain.pop(name) for name in ("applications", "references", "name") if name in plain}
    values = _mapped(plain, (), value_of)
    if missing:
        raise ConfigFileError("\n".join(missing))
    return type(config)(**values, **{**kept, "references": {}})


def _mapped(value: Any, path: Path, function: Callable[[Path, str], Any]) -> Any:
    if isinstance(value, str):
        return function(path, value) if "${" in value else value
    if isinstance(value, Mapping):
        return {key: _mapped(each, (*path, str(key)), function) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, (*path, index), function) for index, each in enumerate(value)]
    return value


def _scalar(text: str) -> Any:
    """Return a number or a bool if a string is one, else the string."""
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return _WORDS.get(text.lower(), text)
