"""Objects that act when this process forks.

A registration with Python lasts as long as the process, and each one delays every fork. So there is one for
all objects, which are known by weak references.
"""

from __future__ import annotations

import os
from functools import cache
from weakref import WeakSet


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
