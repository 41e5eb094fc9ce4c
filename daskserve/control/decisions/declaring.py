"""The changes of the declared configuration by the verbs for applications. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from daskserve.common.copying import replace
from daskserve.common.types import GoalId
from daskserve.control.records.declared import ConfigRecord, DeclarationRecord
from daskserve.control.records.records import Change
from daskserve.control.records.state import State

#: The configurations of a deploy by a program.
NO_CONFIGS: Mapping[str, ConfigRecord] = MappingProxyType({})


def declared(
    state: State,
    configs: Mapping[str, ConfigRecord],
    goals: Mapping[str, GoalId | None],
    *,
    by: str,
    now: float,
) -> Change:
    """Return the change of the declared configuration by a deploy.

    Parameters
    ----------
    configs
        The configurations from which some of the applications were built, by name.
    goals
        The goals of all deployed applications, by name. Applications without a configuration are no longer
        declared.
    """
    change: Change = {}
    for name, goal in goals.items():
        known = state.declared.configs.get(name)
        if name in configs:
            config = configs[name]
            change[config.key] = replace(config, settled=config.generation, error="", goal=goal or "")
        elif known is not None:
            change[known.key] = None
    is_new = any(each.generation > state.declared.last.number for each in configs.values())
    if is_new or any(each is None for each in change.values()):
        record = next_declaration(state, by=by, now=now)
        change[record.key] = record
    return change


def next_declaration(state: State, **fields: Any) -> DeclarationRecord:
    """Return the record of the next change of the declared configuration.

    Parameters
    ----------
    **fields
        Fields of the record. Without ``instance``, the instance's configuration stays the same.
    """
    last = state.declared.last
    now = fields.pop("now")
    fields.setdefault("instance", last.instance)
    return DeclarationRecord(number=last.number + 1, declared_at=now, **fields)


def redeclared(state: State, name: str, config: Mapping[str, Any], *, by: str, now: float) -> ConfigRecord:
    """Return the record that declares an earlier configuration of an application again.

    Pass it to `daskserve.control.decisions.applications.deploy` with the earlier deployments, so that nothing
    is built from it.
    """
    number = state.declared.last.number + 1
    return ConfigRecord(name, config, number, settled=number, declared_at=now, by=by)
