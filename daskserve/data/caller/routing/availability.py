"""Whether a backend has, or may soon have, a replica for waiting requests."""

from __future__ import annotations

from typing import Any

from daskserve.common.formatting import capitalized
from daskserve.common.types import BackendTag, described
from daskserve.data.caller.routing.controller_watch import ControllerWatch
from daskserve.errors import (
    CodeUnavailableError,
    DeploymentIsBeingDeletedError,
    DeploymentUnavailableError,
    UnavailableError,
)


class ReplicaAvailability:
    """The availability of a backend's replicas, as a router knows it."""

    def __init__(self, tag: BackendTag, controller_watch: ControllerWatch) -> None:
        self._tag = tag
        self._kind = "deployment"
        #: Whether there is a controller that could start a replica.
        self.controller_watch = controller_watch
        #: Whether the backend was deleted.
        self.is_deleted = False
        #: Whether the target capacity is 0 %, so that no replica will start.
        self._is_off = False
        #: Why no replica can load its code; empty if a replica can, or if this is not known.
        self._unloadable = ""
        #: Set while the backend is being deleted: the error of its deploy, or an empty string.
        self._ending: str | None = None

    def update(self, value: Any) -> None:
        """Apply the state of the backend that the controller published."""
        self.is_deleted = value is None
        if value is not None:
            self._kind = value.get("kind", self._kind)
            self._is_off = value.get("off", False)
            self._unloadable = value.get("unloadable", "")
            self._ending = value.get("ending")

    @property
    def name(self) -> str:
        """The name in messages."""
        return described(self._tag, self._kind)

    def may_wait(self, *, has_replicas: bool) -> bool:
        """Return whether there is or may soon be a replica for the waiting requests."""
        if self.is_deleted or self._ending is not None:
            return False
        return has_replicas or not (self._is_off or self._unloadable or self.controller_watch.is_lost)

    def ending_error(self) -> UnavailableError | None:
        """Return the error of requests to a backend that failed to deploy or is being deleted; else None."""
        what = capitalized(self.name)
        if self._ending:
            why, _, user_traceback = self._ending.partition("\n")
            error = DeploymentUnavailableError(f"{what} is unavailable because it failed to deploy: {why}")
            if user_traceback:
                error.user_traceback = user_traceback
            return error
        if self._ending is not None and not self.is_deleted:
            return DeploymentIsBeingDeletedError(f"{what} is being deleted.", is_public=True)
        return None

    def error(self) -> UnavailableError:
        """Return the error of requests that may not wait."""
        ending, what = self.ending_error(), capitalized(self.name)
        if ending is not None:
            return ending
        if self.is_deleted:
            return UnavailableError(f"{what} was deleted.", is_public=True)
        if self._unloadable:
            return CodeUnavailableError(
                f"{what} is unavailable because its code is lost or cannot be loaded: {self._unloadable}"
            )
        if not self._is_off:
            return self.controller_watch.error(what)
        return UnavailableError(
            f"{what} has no replicas because the target capacity of its instance is 0 %.", is_public=True
        )
