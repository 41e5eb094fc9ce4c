"""Names of a public module that are loaded on first use, so that importing the module costs little."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, MutableMapping
from typing import Any


class LazyNames:
    """Loads the names of a module from the modules that define them; used as the module's ``__getattr__``.

    Parameters
    ----------
    namespace : mutable mapping
        The module's globals, to which loaded names are added.
    homes : mapping of str to str
        The names by module below ``daskserve``, separated by spaces.
    """

    __slots__ = ("_homes", "_namespace")

    def __init__(self, namespace: MutableMapping[str, Any], homes: Mapping[str, str]) -> None:
        self._namespace = namespace
        self._homes = {name: home for home, names in homes.items() for name in names.split()}

    def __call__(self, name: str) -> Any:
        home = self._homes.get(name)
        if home is None:
            from daskserve.options.fields.ray_names import missing_name

            raise missing_name(self._namespace["__name__"], name)
        value = getattr(importlib.import_module(f"daskserve.{home}"), name)
        self._namespace[name] = value
        return value
