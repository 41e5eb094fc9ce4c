"""References to environment variables in a configuration: ``${NAME}`` and ``${NAME:-default}``.

They stay as they are in what is stored and shown. The process that uses a value puts the variable's in its
place: for an application, the one that builds it. ``$${NAME}`` is the text ``${NAME}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from daskserve.config_file.model import ApplicationConfig, InstanceConfig
from daskserve.config_file.places import Path
from daskserve.errors import ConfigFileError
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.environment import Environment
from daskserve.options.fields.base import Masked
from daskserve.options.http import HTTPOptions

_REFERENCE = re.compile(r"\$(?:(\$)(?=\{)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?)")
_WORDS: Mapping[str, bool] = {"true": True, "false": False}
#: Below these, a variable's value stays text: they are the user's own, or secrets.
_TEXTS = frozenset({"args", "user_config", "init_args", "init_kwargs"}) | {
    name
    for model in (AutoscalingConfig, Environment, HTTPOptions)
    for name, field in model.model_fields.items()
    if any(isinstance(each, Masked) for each in field.metadata)
}

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
    """Return the ways to texts with references, and the texts."""
    for where, text in _texts_in(value, path):
        if any(not found[1] for found in _REFERENCE.finditer(text)):
            yield where, text


def not_references_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Return the ways to texts that have something like a reference, with what is meant to be one."""
    for where, text in _texts_in(value, path):
        rest = _REFERENCE.sub("", text)
        if "${" in rest:
            yield where, re.split(r"(?<=\})|\s", rest[rest.index("${") :], maxsplit=1)[0]


def has_references(value: Any) -> bool:
    """Whether a value, or one in it, has references."""
    return next(references_in(value), None) is not None


def slashed(path: Path) -> str:
    """Return a path as the text that names it in ``references``."""
    return "/".join(map(str, path))


def resolved(config: ConfigT, variables: Mapping[str, str]) -> ConfigT:
    """Return a configuration with the values of variables in place of its references.

    Applications in the configuration of an instance keep theirs.

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
            if value is None and name in variables:
                return ""
            if value is None:
                where = config.references.get(slashed(path), ".".join(map(str, path)))
                missing[
                    f"{where}: there is no environment variable {name!r} in the process that reads it; set "
                    f"it there, or give a default: ${{{name}:-default}}"
                ] = None
                return ""
            return value

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
    """Return a number or a bool if a text is one, else the text."""
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return _WORDS.get(text.lower(), text)
