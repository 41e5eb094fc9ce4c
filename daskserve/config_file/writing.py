"""Writes configurations as YAML or JSON that `daskserve.config_file.reading` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

#: The file, next to the configuration, to which users write the output of ``daskserve schema``.
SCHEMA_FILE = "daskserve.schema.json"
#: The first line of a file, which names its schema for editors.
SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"
_WIDTH = 110


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return the plain values of a configuration, or of one of its applications, as YAML."""
    text: str = yaml.safe_dump(
        without_places(values), sort_keys=False, allow_unicode=True, width=_WIDTH, default_flow_style=False
    )
    return text


def to_json(values: Mapping[str, Any]) -> str:
    """Return the plain values of a configuration as JSON."""
    return json.dumps(without_places(values), indent=2, ensure_ascii=False) + "\n"


def without_places(values: Any) -> Any:
    """Return plain values of a configuration without the places of references, which are not in the file."""
    found = {name: value for name, value in values.items() if name != "references"}
    if "applications" in found:
        found["applications"] = [without_places(each) for each in found["applications"]]
    return found
