"""Keeping passwords that stand in URLs out of what people read: logs, reasons, errors, and `repr`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails

#: What stands for a name and a password.
HIDDEN = "***"
#: The password may hold an @ that nobody escaped, and the scheme may have been forgotten: all up to the last
#: @ before the path is hidden.
_LOGIN = re.compile(r"(?:(?<=://)[^/?#\s]*|[^\s/?#:@'\"]+:[^\s/?#'\"]+)@")
_PARAMETER = re.compile(r"(?<=[?&])((?:user(?:name)?|pass(?:word|wd)?)=)[^&#\s'\"]*", re.IGNORECASE)


def masked(value: Any) -> Any:
    """Return a value of plain values in which no URL has credentials; what else there is stays as it is."""
    if isinstance(value, str):
        return _PARAMETER.sub(rf"\1{HIDDEN}", _LOGIN.sub(f"{HIDDEN}@", value))
    if isinstance(value, Mapping):
        return {masked(key): masked(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(each) for each in value]
    return value


def validated(values: Any, validate: Callable[[Any], Any]) -> Any:
    """Return what a model makes of its values; errors, which show what they were about, show it masked.

    Raises
    ------
    pydantic.ValidationError
        The values are wrong.
    """
    try:
        return validate(values)
    except ValidationError as error:
        shown = [_shown(each) for each in error.errors(include_url=False)]
        title = error.title
    raise ValidationError.from_exception_data(title, shown)


def _shown(found: Any) -> InitErrorDetails:
    given = found["input"]
    # A model hides what is to be hidden in its own `repr`.
    shown = InitErrorDetails(
        type=found["type"], loc=found["loc"], input=given if isinstance(given, BaseModel) else masked(given)
    )
    if "ctx" in found:
        shown["ctx"] = found["ctx"]
    return shown
