"""Decides what a map does when the call of an item fails. Pure."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from daskserve.errors import (
    ActorLostError,
    BackPressureError,
    BadRequestError,
    ClosedError,
    CodeUnavailableError,
    DeploymentIsBeingDeletedError,
    DeploymentUnavailableError,
    InstanceError,
    MethodNotFoundError,
    NotFoundError,
    RequestCancelledError,
    UnavailableError,
)

#: Maximum number of replicas that may be lost during the call of one item, because the item may be the cause.
MAX_LOSSES = 4
#: Delay of the next attempt after a loss, and the minimum delay after a refusal.
LOST_PAUSE_S = 0.05

Errors: TypeAlias = Literal["raise", "return", "skip"]

#: Errors that every item would cause; they end the map.
_OF_ALL = (
    NotFoundError,
    MethodNotFoundError,
    ClosedError,
    InstanceError,
    DeploymentIsBeingDeletedError,
    DeploymentUnavailableError,
    CodeUnavailableError,
    RequestCancelledError,
)


@dataclass(frozen=True, slots=True)
class Retry:
    """The call is made again after a pause.

    Attributes
    ----------
    is_suspect : bool
        Whether the item may have killed its replicas, so that it must not run beside other suspects.
    """

    pause_s: float
    is_suspect: bool = False


@dataclass(slots=True)
class Attempts:
    """The number of failures of one item."""

    failures: int = 0
    losses: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What to do with items whose calls fail.

    Parameters
    ----------
    retries : int
        How often a call that failed with an error of user code is repeated.
    errors : str
        What to do with an item that has failed permanently.
    """

    retries: int = 0
    errors: Errors = "raise"

    def __post_init__(self) -> None:
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise BadRequestError(f"retries must be a whole number, 0 or more; got {self.retries!r}.")
        if self.errors not in get_args(Errors):
            raise BadRequestError(f"errors must be 'raise', 'return' or 'skip'; got {self.errors!r}.")

    def after(self, error: BaseException, attempts: Attempts) -> Retry | None:
        """Count a failure, and return when to try again; None if the item has failed permanently."""
        if isinstance(error, BackPressureError):  # the call has not begun
            return Retry(max(error.retry_after_s, LOST_PAUSE_S))
        if isinstance(error, UnavailableError) and error.is_retryable and not ends_all(error):
            if isinstance(error, ActorLostError) and (not error.begun or error.is_planned):
                return Retry(LOST_PAUSE_S)  # the item is not the cause
            attempts.losses += 1
            if attempts.losses < MAX_LOSSES:
                return Retry(LOST_PAUSE_S * 2**attempts.losses, is_suspect=attempts.losses > 1)
            return None
        attempts.failures += 1
        may_pass = not isinstance(error, BadRequestError) and not ends_all(error)
        return Retry(0.0) if may_pass and attempts.failures <= self.retries else None


def ends_all(error: BaseException) -> bool:
    """Return whether an error does not depend on the item, so that all other items would fail as well."""
    return isinstance(error, _OF_ALL)


def check_collection(verb: str, given: Any, method: str, wanted: str) -> None:
    """Raise `BadRequestError` unless the argument is a Dask collection with this ``method``."""
    if not hasattr(given, method):
        raise BadRequestError(
            f"{verb}() takes {wanted}, not a value of type {type(given).__name__}. For one value, call "
            "handle.remote(value); for the items of an iterable, handle.map(items)."
        )


def check_max_in_flight(value: int | None) -> None:
    """Raise `BadRequestError` unless this is None or a number of calls."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise BadRequestError(f"max_in_flight must be a whole number, 1 or more, or None; got {value!r}.")


def named(error: Any, index: int) -> Any:
    """Return an error with the number of its item, as ``item_index`` and in a note."""
    if getattr(error, "item_index", None) != index:
        with suppress(Exception):  # a foreign error class may not allow it
            error.item_index = index
        error.add_note(f"Item {index} (counted from 0) of handle.map().")
    return error
