"""Mask credentials before they reach logs, reasons, errors and `repr`; secrets in options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic_core import InitErrorDetails

from daskserve.options.base import as_details
from daskserve.options.secrets import HIDDEN, checked_secret

#: The type of an option that holds a secret or a reference to one; see `daskserve.options.secrets`.
Secret = Annotated[str | dict[str, str], BeforeValidator(checked_secret)]

#: A password may contain an unescaped @, and the scheme may be missing, so everything up to the last @ before
#: the path is hidden.
_LOGIN = re.compile(r"(?:(?<=://)[^/?#\s]*|[^\s/?#:@'\"]+:[^\s/?#'\"]+)@")
_PARAMETER = re.compile(r"(?<=[?&])((?:user(?:name)?|pass(?:word|wd)?)=)[^&#\s'\"]*", re.IGNORECASE)


def masked(value: Any) -> Any:
    """Return a copy of plain values in which the credentials of all URLs are masked."""
    if isinstance(value, str):
        return _PARAMETER.sub(rf"\1{HIDDEN}", _LOGIN.sub(f"{HIDDEN}@", value))
    if isinstance(value, Mapping):
        return {masked(key): masked(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(each) for each in value]
    return value


def validated(values: Any, validate: Callable[[Any], Any]) -> Any:
    """Validate values; the inputs shown in validation errors are masked.

    Raises
    ------
    pydantic.ValidationError
        The values are invalid.
    """
    try:
        return validate(values)
    except ValidationError as error:
        shown = [_shown(each) for each in error.errors(include_url=False)]
        title = error.title
    raise ValidationError.from_exception_data(title, shown)


def _shown(found: Any) -> InitErrorDetails:
    given = found["input"]
    # A model masks credentials in its own `repr`.
    return as_details({**found, "input": given if isinstance(given, BaseModel) else masked(given)})
