"""The revisions that are written with a change: one for each new version of an application. Pure.

They are derived from the records of the change, so no verb or step can omit them, and they are written in the
same transaction. A revision holds the records of its application, and the names of its codes. A code is kept
as long as a revision needs it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack

from daskserve.common.copying import replace
from daskserve.common.differences import Difference
from daskserve.common.formatting import counted
from daskserve.common.types import BackendTag
from daskserve.control.decisions.history.differences import differences
from daskserve.control.records.declared import ConfigRecord
from daskserve.control.records.records import (
    AppRecord,
    BackendRecord,
    Change,
    CodeRecord,
    EndpointRecord,
    GoalRecord,
    GoalState,
    Record,
    to_plain,
)
from daskserve.control.records.revisions import RevisionRecord, RevisionState
from daskserve.control.records.state import State
from daskserve.control.records.storing.encoding import from_plain
from daskserve.payload.packed_errors import load_error

#: Number of revisions that are kept of each application.
KEPT_REVISIONS = 10
#: How long the revisions of deleted applications are kept, in seconds, and for how many applications.
KEPT_DELETED_S = 24 * 3600.0
KEPT_DELETED = 100
#: Maximum number of differences that are kept of each revision.
MAX_CHANGES = 100
#: Maximum number of characters of a reason.
MAX_REASON = 2000

S = RevisionState
#: The states of revisions that neither run nor are being deployed.
_ENDED = frozenset({S.SUPERSEDED, S.FAILED, S.ROLLED_BACK, S.DELETED})


@dataclass(slots=True)
class _After:
    """The records after a change."""

    state: State
    change: Change

    def get(self, key: str, known: Record | None) -> Any:
        return self.change.get(key, known)

    def app(self, name: str) -> AppRecord | None:
        found: AppRecord | None = self.get(f"app/{name}", self.state.apps.get(name))
        return found

    def backend(self, tag: BackendTag) -> BackendRecord | None:
        found: BackendRecord | None = self.get(f"backend/{tag}", self.state.backends.get(tag))
        return found

    def endpoint(self, tag: BackendTag) -> EndpointRecord | None:
        found: EndpointRecord | None = self.get(f"endpoint/{tag}", self.state.endpoints.get(tag))
        return found

    def code(self, name: str) -> CodeRecord | None:
        found: CodeRecord | None = self.get(f"code/{name}", self.state.codes.get(name))
        return found


def revised(state: State, change: Change, wall: float, budget_bytes: float) -> Change:
    """Return the revisions to write with a change, and the codes to remove with old revisions.

    Parameters
    ----------
    budget_bytes
        Maximum size of the code that only revisions need. Beyond it, the oldest revisions lose their code.
    """
    ended: list[GoalRecord] = []
    opened: list[GoalRecord] = []
    gone: list[str] = []
    for key, record in change.items():
        if isinstance(record, GoalRecord):
            before = state.goals.get(record.goal_id)
            if record.is_pending and before is None:
                opened.append(record)
            elif not record.is_pending and (before is None or before.is_pending):
                ended.append(record)
        elif record is None and key.startswith("app/"):
            gone.append(key.removeprefix("app/"))
    if not (ended or opened or gone):
        return {}
    revising = _Revising(state, change, wall, budget_bytes)
    for goal in ended:
        revising.end(goal)
    for goal in opened:
        revising.open(goal)
    for name in gone:
        revising.delete(name)
    revising.forget_deleted()
    revising.keep_within_budget()
    return revising.found


@dataclass(slots=True)
class _Revising:
    state: State
    change: Change
    wall: float
    budget_bytes: float
    found: Change = field(default_factory=dict)
    after: _After = field(init=False)
    #: The revisions after the change so far, by application and number, read on demand.
    known: dict[str, dict[int, RevisionRecord]] = field(default_factory=dict)
    #: The change of the number of revisions that need a code.
    needing: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.after = _After(self.state, dict(self.change))

    def revisions(self, name: str) -> list[RevisionRecord]:
        """Return the revisions of an application, oldest first."""
        return list(self.by_number(name).values())

    def by_number(self, name: str) -> dict[int, RevisionRecord]:
        if name not in self.known:
            self.known[name] = {each.number: each for each in self.state.revisions.of(name)}
        return self.known[name]

    def put(self, record: RevisionRecord) -> None:
        self.count(self.by_number(record.application).get(record.number), -1)
        self.count(record, 1)
        self.by_number(record.application)[record.number] = self.found[record.key] = record

    def drop(self, record: RevisionRecord) -> None:
        self.count(record, -1)
        del self.by_number(record.application)[record.number]
        self.found[record.key] = None

    def count(self, record: RevisionRecord | None, by: int) -> None:
        if record is not None and record.is_complete:
            for code in set(record.codes.values()):
                self.needing[code] += by

    def application_of(self, goal: GoalRecord) -> str:
        """Return the application that a goal changes, wholly or in part; empty if there is none."""
        if goal.application or not goal.backend:
            return goal.application
        backend = self.after.backend(goal.backend) or self.state.backends.get(goal.backend)
        return "" if backend is None else backend.application

    def open(self, goal: GoalRecord) -> None:
        name = self.application_of(goal)
        app = self.after.app(name) if name else None
        if app is None or app.is_deleting or not app.deployments:
            return
        before = self.state.apps.get(name)
        revisions = self.revisions(name)
        if before is not None and before.deployments and not revisions:
            # A release without history deployed the application.
            first = self.revision(_After(self.state, {}), before, None, 1)
            revisions = [replace(first, state=S.RUNNING, at=before.deployed_at, ran_at=before.deployed_at)]
            self.put(revisions[0])
        if before is not None and before.is_deleting:
            self.settle(name, S.DELETED, "")
        number = revisions[-1].number + 1 if revisions else 1
        new = self.revision(self.after, app, goal, number)
        is_under_way = any(each.state is S.DEPLOYING for each in self.state.revisions.of(name))
        if not new.changes and not is_under_way and current(revisions) is not None:
            return  # only facts reported by replicas differ
        self.put(new)
        self.trim(name)

    def revision(self, after: _After, app: AppRecord, goal: GoalRecord | None, number: int) -> RevisionRecord:
        """Return the revision of an application's records."""
        members = {name: after.backend(tag) for name, tag in app.deployments.items()}
        backends = {name: each for name, each in members.items() if each is not None}
        methods = {
            name: list(endpoint.python_methods)
            for name, each in backends.items()
            if (endpoint := after.endpoint(each.tag)) is not None
        }
        named = [each for each in backends.values() if each.user_version is not None]
        codes = {each.tag: code for each in named if (code := after.code(each.code_key)) is not None}
        config: ConfigRecord | None = None
        if app.is_declared:
            config = after.get(f"config/{app.name}", self.state.declared.configs.get(app.name))
        is_rollback = goal is not None and bool(goal.rollback_of)
        is_from_file = config is not None and config.key in after.change and not is_rollback
        return RevisionRecord(
            application=app.name,
            number=number,
            state=S.DEPLOYING,
            at=self.wall,
            by="" if goal is None else goal.by,
            source="rollback" if is_rollback else "file" if is_from_file else "run",
            origin={} if config is None else _origin(config),
            config=b"" if config is None else bytes(msgpack.packb(dict(config.config))),
            goal="" if goal is None else goal.goal_id,
            request_id="" if goal is None else goal.request_id,
            rollback_of=0 if goal is None else goal.rollback_of,
            changes=[] if goal is None else self.changes(app),
            spec=packed(app, backends, methods),
            codes={each.tag: each.code_key for each in backends.values()},
            digests={tag: digest_of(code) for tag, code in codes.items()},
        )

    def changes(self, app: AppRecord) -> list[dict[str, str]]:
        """Return the differences from the previous target, which may not have been reached."""
        before = self.state.apps.get(app.name)
        old = {} if before is None or before.is_deleting else before.deployments
        found: list[Difference] = []
        if before is not None and old and before.route != app.route:
            found.append(Difference("", "route", before.route or "", app.route or ""))
        for name in dict.fromkeys([*old, *app.deployments]):
            one = self.state.backends.get(old[name]) if name in old else None
            other = self.after.backend(app.deployments[name]) if name in app.deployments else None
            if one is not other:
                found += differences(name, one, other)
        rest = len(found) - MAX_CHANGES
        if rest > 0:
            found[MAX_CHANGES:] = [Difference("", counted(rest, "more change"))]
        return [asdict(each) for each in found]

    def end(self, goal: GoalRecord) -> None:
        name = self.application_of(goal)
        revision = next((each for each in self.revisions(name) if each.goal == goal.goal_id), None)
        if revision is None:
            return
        has_failed = goal.state is GoalState.FAILED
        if has_failed or goal.successor:
            text = "" if goal.error is None else str(load_error(goal.error))[:MAX_REASON]
            state = S.FAILED if has_failed else S.SUPERSEDED
            ended = replace(revision, state=state, ended_at=self.wall, reason=text)
            # A rollback never returns to a revision that has not run.
            self.put(replace(ended, is_complete=False, spec=b"", config=b""))
            self.release(revision)
        else:
            running = current(self.revisions(name))
            is_other = running is not None and running.number != revision.rollback_of
            state = S.ROLLED_BACK if revision.rollback_of and is_other else S.SUPERSEDED
            self.settle(name, state, f"replaced by revision {revision.number}")
            self.put(replace(revision, state=S.RUNNING, ran_at=self.wall))

    def settle(self, name: str, state: RevisionState, reason: str) -> None:
        """End the revision that runs."""
        for each in self.revisions(name):
            if each.state is S.RUNNING:
                self.put(replace(each, state=state, ended_at=self.wall, reason=reason))

    def delete(self, name: str) -> None:
        app = self.state.apps.get(name)
        goal = self.state.goals.get("" if app is None else app.goal or "")
        self.settle(name, S.DELETED, f"deleted by {goal.by}" if goal is not None and goal.by else "")

    # ---- removal of old revisions

    def trim(self, name: str) -> None:
        """Drop the oldest revisions, except the running one and the one that a rollback would deploy."""
        revisions = self.revisions(name)
        kept = {each.number for each in (current(revisions), earlier(revisions)) if each is not None}
        old = [each for each in revisions if each.number not in kept]
        for each in old[: max(0, len(revisions) - KEPT_REVISIONS)]:
            self.drop(each)
            self.release(each)

    def forget_deleted(self) -> None:
        known = self.state.revisions.applications
        if len(known) <= len(self.state.apps) and not any(
            key.startswith("app/") and each is None for key, each in self.change.items()
        ):
            return
        deleted = {
            name: max(each.ended_at or each.at for each in self.known.get(name, revisions).values())
            for name, revisions in known.items()
            if self.after.app(name) is None
        }
        newest = sorted(deleted, key=lambda name: deleted[name], reverse=True)
        for index, name in enumerate(newest):
            if index >= KEPT_DELETED or deleted[name] < self.wall - KEPT_DELETED_S:
                for each in self.revisions(name):
                    self.drop(each)
                    self.release(each)

    def keep_within_budget(self) -> None:
        if self.state.codes.unused_bytes + self.newly_unused_bytes() <= self.budget_bytes:
            return  # code in use is not removed
        used = {each.code_key for each in self.state.backends.values()}
        used |= {each.code_key for each in self.change.values() if isinstance(each, BackendRecord)}
        names = {*self.state.codes, *(key.removeprefix("code/") for key in self.change if key[:5] == "code/")}
        kept = {name: code.size_bytes for name in names - used if (code := self.after.code(name)) is not None}
        everywhere = [each for name in self.applications() for each in self.revisions(name)]
        for each in everywhere:
            if each.state not in _ENDED:  # code in use does not count
                for name in kept.keys() & set(each.codes.values()):
                    del kept[name]
        total = sum(kept.values())
        for each in sorted(everywhere, key=lambda each: each.at):
            if total <= self.budget_bytes:
                return
            own = kept.keys() & set(each.codes.values())
            if each.is_complete and each.state in _ENDED and own:
                self.put(replace(each, is_complete=False))
                released = self.release(each)
                total -= sum(kept.pop(name) for name in own & released)

    def applications(self) -> set[str]:
        return self.known.keys() | self.state.revisions.applications.keys()

    def newly_unused_bytes(self) -> int:
        """Return an upper bound of the code size that becomes unused by the change."""
        used = {each.code_key for each in self.change.values() if isinstance(each, BackendRecord)}
        changed = (key.removeprefix("backend/") for key in self.change if key.startswith("backend/"))
        before = (self.state.backends.get(tag) for tag in changed)
        left = {each.code_key for each in before if each is not None}
        known = [code for name in left - used if (code := self.state.codes.get(name)) is not None]
        added = [
            each for each in self.change.values() if isinstance(each, CodeRecord) and each.name not in used
        ]
        return sum(each.size_bytes for each in (*known, *added))

    def release(self, revision: RevisionRecord) -> set[str]:
        """Remove the codes that no revision needs; return their names.

        The steps of a deployment that still exists remove its own codes.
        """
        released: set[str] = set()
        for tag, code in revision.codes.items():
            key = f"code/{code}"
            if self.state.revisions.need(code) + self.needing[code] or self.after.code(code) is None:
                continue
            released.add(code)
            if self.after.backend(tag) is None:
                self.found[key] = self.after.change[key] = None
        return released


def current(revisions: Iterable[RevisionRecord]) -> RevisionRecord | None:
    """Return the revision that runs; None if there is none."""
    return next((each for each in revisions if each.state is S.RUNNING), None)


def earlier(revisions: list[RevisionRecord]) -> RevisionRecord | None:
    """Return the last revision that ran before the current one; None if there is none.

    For a deleted application, this is the last one that ran.
    """
    ran = [each for each in revisions if each.ran_at and each.state in _ENDED and each.is_complete]
    return max(ran, key=lambda each: (each.ended_at, each.number), default=None)


def _origin(config: ConfigRecord) -> dict[str, str]:
    """Return the origin of a declared configuration."""
    return {name: value for name, value in (("file", config.source), ("version", config.version)) if value}


def packed(app: AppRecord, backends: Mapping[str, BackendRecord], methods: Mapping[str, list[str]]) -> bytes:
    """Return the records of an application as bytes."""
    wanted = {
        name: replace(each, rollout=None, scalings=(), last_error="") for name, each in backends.items()
    }
    plain = {name: to_plain(each) for name, each in wanted.items()}
    return bytes(msgpack.packb({"route": app.route, "backends": plain, "methods": methods}))


def unpacked(spec: bytes) -> tuple[str | None, dict[str, BackendRecord], dict[str, list[str]]]:
    """Return the route, the backends and the Python methods of an application."""
    plain = msgpack.unpackb(spec)
    backends = {name: from_plain(BackendRecord.KIND, each) for name, each in plain["backends"].items()}
    return plain["route"], backends, plain["methods"]


def digest_of(code: CodeRecord) -> str:
    """Return the digest of a code."""
    return hashlib.sha256(code.code).hexdigest()[:16]
