"""The differences between two versions of a deployment, as strings for people, without secrets. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from daskserve.common.differences import Difference
from daskserve.control.decisions import differences as change_differences
from daskserve.control.records.records import BackendRecord
from daskserve.control.records.versions import unmarked
from daskserve.options.environment import Environment
from daskserve.options.fields.secrets import without_secrets

#: Maximum length of a shown value.
MAX_VALUE = 120


def differences(name: str, before: BackendRecord | None, after: BackendRecord | None) -> Iterator[Difference]:
    """Yield the differences between two records of the deployment ``name``; None if it does not exist."""
    if after is None or before is None:
        if after is not before:
            version = unmarked((after or before).version)  # type: ignore[union-attr]
            yield Difference(name, "created", "", version) if after else Difference(name, "removed", version)
        return
    for each in change_differences.differences(before, after):
        yield from _as_texts(name, each, before, after)


def _as_texts(
    name: str, each: change_differences.Difference, before: BackendRecord, after: BackendRecord
) -> Iterator[Difference]:
    if each.option == change_differences.CODE:
        yield Difference(name, each.option, unmarked(before.version), unmarked(after.version))
    elif each.option == change_differences.ENV:
        yield Difference(name, each.option, _environment(before.env), _environment(after.env))
    elif each.option == change_differences.USER_CONFIG and each.values is None:
        yield Difference(name, each.option, _digest(before.user_config), _digest(after.user_config))
    elif each.values is None:
        yield Difference(name, each.option)
    else:
        one, other = each.values
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            for key in sorted(one.keys() | other.keys(), key=str):
                if one.get(key) != other.get(key):
                    what = f"{each.option}.{key}"
                    yield Difference(name, what, _shown(key, one.get(key)), _shown(key, other.get(key)))
        else:
            yield Difference(name, each.option, _shown(each.option, one), _shown(each.option, other))


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        return _digest(value)
    text = "" if value is None else str(without_secrets(name, value))
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


def _digest(value: bytes | None) -> str:
    """Return a short digest to show instead of pickled data."""
    return "" if value is None else f"#{hashlib.sha256(value).hexdigest()[:8]}"


def _environment(text: str | None) -> str:
    return "" if text is None else _shown("env", Environment.from_text(text).to_shown_text())
