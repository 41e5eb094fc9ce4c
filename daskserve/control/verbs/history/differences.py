"""What differs between two versions of a deployment, as texts for people, without secrets. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from daskserve.common.differences import Difference
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.versions import unmarked
from daskserve.options.base import Options
from daskserve.options.environment import Environment
from daskserve.options.secrets import HIDDEN, masked

#: Longest text of a value.
MAX_VALUE = 120
#: Names of values that are not shown, such as those in ``policy_kwargs``.
_SECRET = re.compile(r"passw|secret|token|credential|api_?key", re.IGNORECASE)


def differences(name: str, before: BackendRecord | None, after: BackendRecord | None) -> Iterator[Difference]:
    """Yield what differs between two records of the deployment ``name``; None: it is not there."""
    if after is None or before is None:
        if after is not before:
            version = unmarked((after or before).version)  # type: ignore[union-attr]
            yield Difference(name, "created", "", version) if after else Difference(name, "removed", version)
        return
    if before.version != after.version and unmarked(before.version) != unmarked(after.version):
        yield Difference(name, "code", unmarked(before.version), unmarked(after.version))
    for old, new in ((before.config, after.config), (before.actor_options, after.actor_options)):
        yield from _of_options(name, old, new)
    if before.user_config != after.user_config:
        yield Difference(name, "user_config", _digest(before.user_config), _digest(after.user_config))
    if before.env != after.env:
        yield Difference(name, "env", _environment(before.env), _environment(after.env))


def _of_options(name: str, before: Options, after: Options) -> Iterator[Difference]:
    old, new = before.model_dump(exclude_defaults=True), after.model_dump(exclude_defaults=True)
    for option in sorted(old.keys() | new.keys()):
        if option == "internal_metadata" or old.get(option) == new.get(option):
            continue
        one, other = old.get(option), new.get(option)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            for key in sorted(one.keys() | other.keys(), key=str):
                if one.get(key) != other.get(key):
                    what = f"{option}.{key}"
                    yield Difference(name, what, _shown(key, one.get(key)), _shown(key, other.get(key)))
            continue
        yield Difference(name, option, _default(before, option, one), _default(after, option, other))


def _default(options: Options, option: str, value: Any) -> str:
    """Return the text of an option, that of its default if it is not set."""
    return _shown(option, getattr(options, option, None) if value is None else value)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        return _digest(value)
    text = "" if value is None else str(masked(_without_secrets(name, value)))
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


def _without_secrets(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_secrets(str(key), each) for key, each in value.items()}
    return HIDDEN if value and _SECRET.search(name) else value


def _digest(value: bytes | None) -> str:
    """Return a name for pickled data, which is not shown."""
    return "" if value is None else f"#{hashlib.sha256(value).hexdigest()[:8]}"


def _environment(text: str | None) -> str:
    return "" if text is None else _shown("env", Environment.from_text(text).to_shown_text())
