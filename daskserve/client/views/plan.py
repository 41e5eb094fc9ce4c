"""The result of ``plan_config()``: what a configuration would change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskserve.client.views.plain import FromPlain

#: The sign of each kind of change of an application or a deployment.
SIGNS: Mapping[str, str] = {"new": "+", "deleted": "-", "goes": "-", "failed": "!", "unchanged": " "}
CHANGED = "~"


@dataclass(frozen=True, slots=True)
class Plan(FromPlain):
    """The changes that a configuration would make. Print it to see the list.

    Attributes
    ----------
    version : int
        The number of the configuration that it was compared with.
    applications : dict
        By name: the ``action`` (new, changed, unchanged, deleted, failed), the ``route`` before and after, a
        ``message``, and by deployment its ``action`` (new, restarts, reconfigured, scaled, at once,
        unchanged, goes) and its ``changes``: dicts with ``option``, ``effect``, ``old`` and ``new``.
    options : list
        Changed options of the instance: dicts with ``option``, ``old`` and ``new``.
    warnings : list of str
        Hints for the file's author.
    """

    version: int
    applications: Mapping[str, Mapping[str, Any]]
    options: Sequence[Mapping[str, Any]] = ()
    warnings: Sequence[str] = field(default_factory=list)

    @property
    def has_changes(self) -> bool:
        """Whether anything would change."""
        return bool(self.options) or bool(self._named("new", "changed", "deleted"))

    @property
    def failed(self) -> dict[str, str]:
        """The applications that cannot be built or deployed, each with the reason."""
        return {name: self.applications[name]["message"] for name in self._named("failed")}

    def _named(self, *actions: str) -> list[str]:
        return [name for name, each in self.applications.items() if each["action"] in actions]

    def to_plain(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON."""
        return {
            "version": self.version,
            "has_changes": self.has_changes,
            "applications": {name: dict(each) for name, each in self.applications.items()},
            "options": list(self.options),
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        lines = [line for name, each in self.applications.items() for line in _application(name, each)]
        lines += [f"~ {each['option']}: {_values(each)}" for each in self.options]
        counts = {
            word: len(self._named(word)) for word in ("new", "changed", "unchanged", "deleted", "failed")
        }
        total = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        return "\n".join([*lines, f"Applications: {total or 'none'}."])


def _application(name: str, app: Mapping[str, Any]) -> Iterator[str]:
    action, message = app["action"], app.get("message", "")
    if action == "unchanged":
        return
    sign = SIGNS.get(action, CHANGED)
    yield f"{sign} application {name!r}: {action}{'. ' + message.splitlines()[0] if message else ''}"
    for line in message.splitlines()[1:]:
        yield f"    {line}"
    before, after = app.get("route", (None, None))
    if before != after:
        yield f"  {CHANGED if before else '+'} route: {_values({'old': before, 'new': after})}"
    for deployment, each in app["deployments"].items():
        if each["action"] == "unchanged":
            continue
        yield f"  {SIGNS.get(each['action'], CHANGED)} deployment {deployment!r}: {each['action']}"
        for change in each["changes"]:
            values = f": {_values(change)}" if "old" in change else ""
            yield f"      {change['option']}{values} ({change['effect']})"


def _values(change: Mapping[str, Any]) -> str:
    return f"{change['new']!r}" if change["old"] is None else f"{change['old']!r} -> {change['new']!r}"
