"""No class overrides a private method of another library, except in the modules that check for them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from tables import each_case
from tornado.http1connection import HTTP1Connection

import daskserve
import daskserve.proxies

pytestmark = pytest.mark.smoke

CHECKED = (
    "daskserve.internals.",
    "daskserve.cluster.distributed_internals",
    "daskserve.cluster.worker.request_tasks",
)
#: Modules with side effects when they are imported.
PROGRAMS = ("daskserve.__main__",)


def modules() -> Iterator[ModuleType]:
    for package in (daskserve, daskserve.proxies):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name not in PROGRAMS:
                yield importlib.import_module(found.name)


def classes(module: ModuleType) -> Iterator[type[Any]]:
    for each in vars(module).values():
        if inspect.isclass(each) and each.__module__ == module.__name__:
            yield each


def overridden(cls: type[Any], own: str = "daskserve.") -> list[str]:
    """Return the private methods of bases from elsewhere that a class, or one of ours above it, replaces."""
    return [
        f"{cls.__module__}.{cls.__qualname__}.{name} overrides {base.__qualname__}.{name}"
        for name, value in vars(cls).items()
        if name.startswith("_") and not name.endswith("_")
        if callable(value) or isinstance(value, (property, classmethod, staticmethod))
        for base in cls.__mro__[1:]
        if name in vars(base) and not base.__module__.startswith(own)
    ]


def test_private_methods_are_overridden_only_where_they_are_checked() -> None:
    found = {
        line
        for module in modules()
        if not module.__name__.startswith(CHECKED)
        for cls in classes(module)
        for line in overridden(cls)
    }
    assert not found


class Reader(HTTP1Connection):
    async def _read_message(self, delegate: Any) -> bool:
        return True

    def _mine(self) -> None: ...


def test_the_check_sees_an_override() -> None:
    (line,) = overridden(Reader)
    assert line.endswith("Reader._read_message overrides HTTP1Connection._read_message")


@each_case("name", ["daskserve.proxies.server.tornado_transport", "daskserve.client.functions.instances"])
def test_the_check_sees_every_module(name: str) -> None:
    assert name in {module.__name__ for module in modules()}
