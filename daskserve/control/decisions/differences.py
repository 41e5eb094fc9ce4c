"""The differences between two records of a deployment, and their effect on running replicas. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daskserve.control.decisions.user_configs import changed_values
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.versions import unmarked
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.options.fields.base import Effect, Options, effect_of
from daskserve.options.fields.code import shown_options
from daskserve.options.fields.secrets import masked

#: Differences that are not options of a model.
CODE, ENV, USER_CONFIG, CALLS = "code", "env", "user_config", "what it calls"
_NO_EFFECTS: Mapping[Effect, Effect] = {}


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference. ``values`` are the old and the new value, masked; None if they are not readable."""

    option: str
    effect: Effect
    values: tuple[Any, Any] | None = None


def differences(old: BackendRecord, new: BackendRecord) -> list[Difference]:
    """Return the differences between two records of a deployment."""
    found = []
    if unmarked(old.version) != unmarked(new.version):
        versions = (old.user_version, new.user_version)
        found.append(Difference(CODE, Effect.REPLACES, None if versions == (None, None) else versions))
    found += _of_options(
        ActorOptions, old.actor_options, new.actor_options, {Effect.RECONFIGURES: Effect.REPLACES}
    )
    if old.env != new.env:
        found.append(Difference(ENV, Effect.REPLACES))  # not shown, because its values may be secrets
    if old.user_config != new.user_config:
        values = changed_values(old.user_config, new.user_config)
        found += [Difference(_within(path), Effect.RECONFIGURES, (one, other)) for path, one, other in values]
        # not shown, because they are not plain values
        found += [] if values else [Difference(USER_CONFIG, Effect.RECONFIGURES)]
    found += _of_options(BackendConfig, old.config, new.config, _NO_EFFECTS)
    if old.needs != new.needs:
        found.append(Difference(CALLS, Effect.REPLACES))
    return found


def _within(path: str) -> str:
    """Return the name of a value in the ``user_config``."""
    return f"{USER_CONFIG}{'' if not path or path.startswith('[') else '.'}{path}"


def _of_options(
    model: type[Options], old: Options, new: Options, effects: Mapping[Effect, Effect]
) -> Iterator[Difference]:
    plain = shown_options(old), shown_options(new)
    given = [shown_options(each, exclude_unset=True) for each in (old, new)]
    hidden = model._masked_field()
    for name, field in model.model_fields.items():
        one, other = (each.get(name) for each in plain)
        if one == other or name in ("user_config", "internal_metadata"):
            continue
        effect = effect_of(field)
        show = hidden.get(name, masked)
        first = show(_named(given[0].get(name, one), one, other))
        second = show(_named(given[1].get(name, other), other, one))
        yield Difference(name, effects.get(effect, effect), _parts(first, second, one, other))


def _named(given: Any, whole: Any, other: Any) -> Any:
    """Return the entries of a mapping that the user has set, or that differ from the other mapping."""
    if not all(isinstance(each, Mapping) for each in (given, whole, other)):
        return given
    return {
        name: given.get(name, value)
        for name, value in whole.items()
        if name in given or other.get(name) != value
    }


def _parts(shown: Any, shown_other: Any, one: Any, other: Any) -> tuple[Any, Any]:
    """Return two values to show; for mappings, such as nested options, only the entries that differ."""
    pair = (shown, shown_other)
    if not all(isinstance(each, Mapping) for each in (*pair, one, other)):
        return pair
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    first, second = ({name: each[name] for name in names if name in each} for each in pair)
    return first, second
