"""YAML as plain values with their places.

PyYAML composes the nodes, which have their places. The values are those of its safe loader, with three
differences, so that a file means the same in JSON: a date is a string, a key is the string as it was written
(``on`` is no bool there), and two equal keys are a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import yaml

from daskserve.config_file.option_checks import shortened
from daskserve.config_file.places import MAX_DEPTH, MAX_VALUES, Document, Faults, Path, Place

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_SCALARS: Mapping[str, Callable[[Any, Any], Any]] = {
    f"{_TAG}null": lambda loader, node: None,
    f"{_TAG}bool": lambda loader, node: loader.construct_yaml_bool(node),
    f"{_TAG}int": lambda loader, node: loader.construct_yaml_int(node),
    f"{_TAG}float": lambda loader, node: loader.construct_yaml_float(node),
    f"{_TAG}str": lambda loader, node: node.value,
    f"{_TAG}timestamp": lambda loader, node: node.value,
    f"{_TAG}value": lambda loader, node: node.value,
}


def parse_yaml(text: str, faults: Faults) -> Document:
    """Return the documents of a text; record its errors."""
    building = _Building(faults)
    # With libyaml, the loader in C is several times as fast.
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        nodes = list(yaml.compose_all(text, Loader=loader))
    except yaml.MarkedYAMLError as error:
        around = f" {error.context}" if error.context else ""
        faults.add(_place(error.problem_mark), f"this is not YAML: {error.problem}{around}")
        return building.document
    except yaml.YAMLError as error:
        faults.add(Place(1, 1), f"this is not YAML: {error}")
        return building.document
    except RecursionError:
        faults.add(Place(1, 1), f"values are nested deeper than {MAX_DEPTH} levels")
        return building.document
    for node in nodes:
        if node is None or (node.tag == f"{_TAG}null" and len(nodes) > 1):
            continue  # an empty document
        building.document.values.append(building.value(node, (len(building.document.values),), None))
    return building.document


def _place(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1)


class _Building:
    """Builds plain values from nodes."""

    def __init__(self, faults: Faults) -> None:
        self.document = Document()
        self._faults = faults
        self._constructor = yaml.constructor.SafeConstructor()
        self._around: set[int] = set()
        self._count = 0

    def value(self, node: Any, path: Path, key: Place | None) -> Any:
        """Return the value of a node."""
        place = _place(node.start_mark)
        self.document.put(path, place, key)
        self._count += 1
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place)
        if id(node) in self._around or len(self._around) >= MAX_DEPTH or self._count > MAX_VALUES:
            problem = (
                "this value contains itself, by an alias"
                if id(node) in self._around
                else f"values are nested deeper than {MAX_DEPTH} levels"
                if self._count <= MAX_VALUES
                else f"with its aliases resolved, the file has more than {MAX_VALUES} values"
            )
            self._faults.add(place, problem)
            return None
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            self._faults.add(place, f"the tag {_shown_tag(node.tag)} is not known here; leave it out")
            return None
        self._around.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self.value(each, (*path, index), None) for index, each in enumerate(node.value)]
        finally:
            self._around.remove(id(node))

    def _scalar(self, node: Any, place: Place) -> Any:
        construct = _SCALARS.get(node.tag)
        try:
            if construct is not None:
                return construct(self._constructor, node)
        except (ValueError, LookupError, yaml.YAMLError):
            pass  # such as !!int with a text, or without a value
        self._faults.add(
            place, f"{shortened(node.value)} cannot have the tag {_shown_tag(node.tag)}; leave the tag out"
        )
        return None

    def _mapping(self, node: Any, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        first: dict[str, Place] = {}
        for key_node, value_node in node.value:
            place = _place(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                self._faults.add(place, "a key must be text")
            elif key_node.tag == _MERGE:
                self._merge(value_node, path, merged)
            elif key_node.value in first:
                line = first[key_node.value].line
                self._faults.add(place, f"the key {key_node.value!r} is here already, in line {line}")
            else:
                first[key_node.value] = place
                found[key_node.value] = self.value(value_node, (*path, key_node.value), place)
        for name in merged.keys() & found.keys():
            # Merging has recorded the places of values that this mapping overrides.
            node_of = next(pair for pair in node.value if pair[0].value == name)
            self.document.put((*path, name), _place(node_of[1].start_mark), first[name])
        return {**merged, **found}

    def _merge(self, node: Any, path: Path, merged: dict[str, Any]) -> None:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for each in reversed(nodes):  # the first mapping in a list takes precedence
            if not isinstance(each, yaml.MappingNode):
                self._faults.add(_place(each.start_mark), "<<: takes a mapping, or a list of mappings")
                continue
            value = self.value(each, path, None)
            if isinstance(value, dict):
                merged.update(value)


def _shown_tag(tag: str) -> str:
    return tag.replace(_TAG, "!!")
