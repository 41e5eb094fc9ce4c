"""Errors of lookups; they say so if the missing name belongs to a first deploy that failed. Pure."""

from __future__ import annotations

from daskserve.common.types import DEFAULT_APPLICATION, BackendTag
from daskserve.control.records.records import AppRecord, GoalRecord, GoalState
from daskserve.control.records.state import State
from daskserve.errors import NotFoundError, ServeError
from daskserve.payload.packed_errors import load_error


def not_found(state: State, what: str, tag: BackendTag) -> NotFoundError:
    """Return the error of a failed lookup. ``what`` is its first sentence."""
    application, slash, name = tag.rpartition("/")
    goals = [each for each in state.goals.values() if each.backend == tag]
    last = max(goals, key=lambda goal: goal.number, default=None)
    if last is not None:
        return _error(what, last if last.state is GoalState.FAILED else None)
    app = state.apps.get(application if slash else DEFAULT_APPLICATION)
    return _error(what, app if app is not None and name in app.tried else None)


def application_not_found(state: State, name: str) -> NotFoundError:
    """Return the error of a lookup of an application."""
    known = sorted(each.name for each in state.apps if each.deployments and not each.is_deleting)
    what = f"Application '{name}' does not exist; there are: {', '.join(known) or 'none'}."
    return _error(what, state.apps.get(name))


def _error(what: str, failed: AppRecord | GoalRecord | None) -> NotFoundError:
    reason = user_traceback = ""
    if isinstance(failed, AppRecord) and failed.last_error and not failed.is_deleting:
        text, _, user_traceback = failed.last_error.partition("\n")
        reason = f"The deploy of application '{failed.name}' failed: {text}"
    elif isinstance(failed, GoalRecord) and failed.error is not None:
        error = load_error(failed.error)
        reason = f"Its deploy failed: {error}"
        user_traceback = error.user_traceback if isinstance(error, ServeError) else ""
    found = NotFoundError(f"{what} {reason}".rstrip(), reason=reason)
    if user_traceback:
        found.user_traceback = user_traceback
    return found
