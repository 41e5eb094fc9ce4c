"""Converts the dead replicas of a backend to records and back. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from daskserve.common.types import BackendTag
from daskserve.control.backend.inputs import Step, StepInputs
from daskserve.control.observed.observed import KEPT_DEAD, DeadReplica, Notes
from daskserve.control.records.deaths import DeathsRecord
from daskserve.control.records.records import BackendRecord

#: Maximum numbers of characters stored for a reason, a traceback, and all log lines.
MAX_REASON, MAX_TRACEBACK, MAX_LINES = 500, 2000, 2000


def keep_deaths(inputs: StepInputs, backend: BackendRecord, step: Step) -> None:
    """Add the dead replicas of a backend to the change of a step, if there are new ones."""
    if step.change.get(backend.key, backend) is None:
        if (known := inputs.state.events.deaths.get(backend.tag)) is not None:
            step.change[known.key] = None
    elif step.notes.dead != inputs.observed.notes_of(backend.tag).dead:
        record = recorded(backend.tag, step.notes.dead)
        step.change[record.key] = record


def recorded(tag: BackendTag, dead: Iterable[DeadReplica]) -> DeathsRecord:
    """Return the record of the last dead replicas, with long texts shortened."""
    return DeathsRecord(tag, [_row(each) for each in tuple(dead)[-KEPT_DEAD:]])


def _row(death: DeadReplica) -> list[object]:
    kept, left = len(death.last_lines), MAX_LINES
    while kept and (left := left - len(death.last_lines[kept - 1])) >= 0:
        kept -= 1
    lines = list(death.last_lines[kept:])
    reason, user_traceback = death.reason[:MAX_REASON], death.user_traceback[-MAX_TRACEBACK:]
    return [death.name, reason, death.at, user_traceback, lines, death.version]


def remembered(record: DeathsRecord) -> Notes:
    """Return the notes with which a new controller begins."""
    dead = (
        DeadReplica(name, reason, at, user_traceback, tuple(lines), version)
        for name, reason, at, user_traceback, lines, version in record.entries
    )
    return Notes(dead=tuple(dead))
