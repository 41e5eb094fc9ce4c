"""Objects that act when this process forks.

A registration with Python lasts as long as the process, and each registration delays every fork. So there is
one registration for all objects, which are known by weak references.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet


class ActsAtFork:
    """Acts when this process forks; the default is to do nothing."""

    def before_fork(self) -> None:
        """Act in the thread that forks."""

    def after_fork(self) -> None:
        """Act in the same thread after the fork, in this process."""

    def after_fork_in_child(self) -> None:
        """Act in the forked process."""


def watch_forks(found: ActsAtFork) -> None:
    """Let an object act when this process forks, for as long as the object exists."""
    _watching().add(found)


@cache
def _watching() -> WeakSet[ActsAtFork]:
    """Return the objects that act."""
    found: WeakSet[ActsAtFork] = WeakSet()

    def before() -> None:
        for each in list(found):
            each.before_fork()

    def after_in_parent() -> None:
        for each in list(found):
            each.after_fork()

    def after_in_child() -> None:
        for each in list(found):
            each.after_fork_in_child()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)
    return found


def call_in_forks(method: Callable[[], object]) -> None:
    """Call a method in each process that is forked from this one, for as long as its object exists.

    An object has one such method.
    """
    assert isinstance(method, MethodType)
    # Not a `WeakMethod`, whose callback fails if both are collected together, as when the process exits.
    _called().methods[method.__self__] = method.__func__


class _Called(ActsAtFork):
    """The methods that are called in forked processes."""

    def __init__(self) -> None:
        self.methods: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()
        watch_forks(self)

    def after_fork_in_child(self) -> None:
        for found, method in list(self.methods.items()):
            method(found)


@cache
def _called() -> _Called:
    return _Called()
