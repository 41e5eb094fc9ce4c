"""Reads a configuration file: text in, configuration and warnings out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from daskserve.common.types import DEFAULT_APPLICATION
from daskserve.config_file.checking import Checks, places_of_references
from daskserve.config_file.json_text import parse_json
from daskserve.config_file.limits import excess, outsized_in
from daskserve.config_file.model import InstanceConfig
from daskserve.config_file.option_checks import shortened
from daskserve.config_file.places import Document, Faults, Place
from daskserve.config_file.references import ConfigT, not_references_in, resolved
from daskserve.config_file.toml_text import parse_toml
from daskserve.config_file.yaml_text import parse_yaml
from daskserve.errors import ConfigFileError

#: The endings of the names of configuration files.
SUFFIXES = (".yaml", ".yml", ".json", ".toml")


@dataclass(frozen=True, slots=True)
class ReadFile:
    """The content of a file, and warnings for its author.

    Attributes
    ----------
    warnings : list of str
        One line each, with the place in the file.
    """

    config: InstanceConfig
    warnings: list[str] = field(default_factory=list)


def is_config_file(target: str) -> bool:
    """Return whether a target is the name of a configuration file, and not an import path."""
    return target.endswith(SUFFIXES)


def read(text: str, name: str = "serve.yaml") -> ReadFile:
    """Return the configuration in a text.

    Parameters
    ----------
    name : str
        The name of the file, for errors. Its suffix determines the format: JSON, TOML, or else YAML.

    Raises
    ------
    ConfigFileError
        The file has faults. The message has a line for each, in the order of their places.
    """
    faults = Faults(name)
    document = _parsed(text.removeprefix("\ufeff"), faults)
    if too_many := excess(_applications(document)):
        # Checked first, because checking too many values takes long.
        faults.add(Place(1, 1), too_many)
        faults.check()
    checks = Checks(document, faults)
    parts = [(index, checks.instance(value, (index,))) for index, value in enumerate(document.values)]
    if not parts and not faults.found:
        faults.add(Place(1, 1), "the file is empty; it must have the key 'applications'")
    for path, number in outsized_in(document.values):
        faults.add(
            document.at(path), f"{shortened(number)} has more than 64 bits; write it in quotes, as text"
        )
    for path, given in not_references_in(document.values):
        why = "a reference is ${NAME} or ${NAME:-default}; $${ is the text ${"
        faults.warn(document.at(path), f"{shortened(given)} stays as it is: {why}")
    values: dict[str, Any] = {"applications": []}
    for index, part in parts:
        _join(values, part, (index,), document, faults)
    faults.check()
    return ReadFile(InstanceConfig(**values), faults.lines(faults.warnings))


def checked(
    values: Mapping[str, Any], part: Literal["instance", "application", "deployment"]
) -> dict[str, Any]:
    """Return the values of a file, or of a part of it, that daskserve reads.

    Raises
    ------
    ConfigFileError
        The values have faults. The message has a line for each.
    """
    faults = Faults("")
    checks = Checks(Document(), faults)
    found: dict[str, Any] = getattr(checks, part)(values, ())
    if faults.found:
        raise ConfigFileError("\n".join(text for _, text in sorted(faults.found)))
    return found


def in_force(config: ConfigT, variables: Mapping[str, str]) -> ConfigT:
    """Return a configuration with the values of variables, like `resolved`; these values are also checked.

    Raises
    ------
    ConfigFileError
        A variable is missing, or has a wrong value.
    """
    found = resolved(config, variables)
    if config.references:
        plain = {name: each for name, each in found.to_plain().items() if name != "references"}
        if isinstance(found, InstanceConfig):
            checked({**plain, "applications": []}, "instance")
        else:
            checked(plain, "application")
    return found


def _applications(document: Document) -> list[Any]:
    parts = [each for each in document.values if isinstance(each, Mapping)]
    lists = [each.get("applications", [each]) for each in parts]
    return [app for each in lists if isinstance(each, list) for app in each]


def _parsed(text: str, faults: Faults) -> Document:
    if faults.name.endswith(".json"):
        return parse_json(text, faults)
    if faults.name.endswith(".toml"):
        return parse_toml(text, faults)
    return parse_yaml(text, faults)


def _join(
    values: dict[str, Any], part: Mapping[str, Any], path: tuple[int], document: Document, faults: Faults
) -> None:
    """Add the values of one document of a file to the values of the others."""
    has_list = document.has((*path, "applications"))
    for index, each in enumerate(part.get("applications", ())):
        where = (*path, "applications", index) if has_list else path
        references = places_of_references(each, where, document, faults.name)
        named = {"name": DEFAULT_APPLICATION, **each}  # applications are stored by name
        if has_list and part.get("logging_config"):
            # The instance may already run, so the file's logging options are applied to its deployments
            # instead.
            outer = {"logging_config": part["logging_config"]}
            references = {**places_of_references(outer, path, document, faults.name), **references}
            named["logging_config"] = {**part["logging_config"], **(each.get("logging_config") or {})}
        values["applications"].append({**named, "references": references} if references else named)
    others = {name: value for name, value in part.items() if name != "applications"}
    for name, value in others.items():
        if name in values:
            faults.add(document.key_at((*path, name)), f"another document of this file has {name}, too")
        values[name] = value
    references = places_of_references(others, path, document, faults.name)
    if references:
        values["references"] = {**values.get("references", {}), **references}
