"""Decides when an instance that starts, or takes over a store, may begin to listen. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from daskserve.control.observed.observed import Observed
from daskserve.control.proxies.step import is_ready
from daskserve.control.records.state import State


class Listening(enum.Enum):
    """Whether an instance has proxies: later, now, or no longer because it ends."""

    LATER = enum.auto()
    NOW = enum.auto()
    NO_MORE = enum.auto()


@dataclass(frozen=True, slots=True)
class ListenRules:
    """The conditions for an instance to listen: its replicas run, and it has its first route."""

    waits_for_replicas: bool = False
    waits_for_route: bool = False

    @property
    def first(self) -> Listening:
        """Whether a new controller has proxies at once."""
        return Listening.LATER if self.waits_for_replicas or self.waits_for_route else Listening.NOW

    def are_met(self, state: State, observed: Observed) -> bool:
        """Return whether the instance may listen. An instance that already has proxies needs no route."""
        has_opened = bool(state.proxies) or any(each.route for each in state.endpoints.values())
        return (has_opened or not self.waits_for_route) and (
            not self.waits_for_replicas or all_run(state, observed)
        )


def listens(state: State, observed: Observed) -> bool:
    """Return whether there are proxies, and all required proxies listen."""
    proxies = [each for each in state.proxies.values() if not each.is_leaving]
    return bool(proxies) and all(is_ready(observed, proxy) for proxy in proxies)


def all_run(state: State, observed: Observed) -> bool:
    """Return whether this controller has seen the replicas that every settled backend needs.

    A backend with a pending change does not count: the change may fail, and it was not complete before.
    """
    for tag, backend in state.backends.items():
        if backend.goal is None and not backend.is_deleting:
            seen = sum(each.tag in observed.ready for each in state.running(tag))
            if seen < backend.needed_replicas:
                return False
    return True
