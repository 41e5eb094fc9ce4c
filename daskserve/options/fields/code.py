"""Code as the value of an option: in records and messages, it is pickled, and in views it is a short text."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final

from pydantic import BaseModel, PlainSerializer, SerializationInfo

from daskserve.options.fields.pickled import PICKLED

#: The context of serializations for people.
_FOR_PEOPLE: Final = "for people"


def shown_options(options: BaseModel, **how: Any) -> dict[str, Any]:
    """Return options as JSON values for people, which do not contain pickled code; it may contain secrets."""
    return options.model_dump(mode="json", fallback=repr, context=_FOR_PEOPLE, **how)


def _shown_code(value: Any, info: SerializationInfo) -> Any:
    if info.context != _FOR_PEOPLE:
        return value
    if callable(value):
        return getattr(value, "__qualname__", repr(value))
    if isinstance(value, str) and value.startswith(PICKLED):
        value = value.encode()
    return f"pickled code #{hashlib.sha256(value).hexdigest()[:8]}" if isinstance(value, bytes) else value


#: The type of an option that may be code. For people, a function is its name, and pickled code is a digest.
Code = Annotated[Any, PlainSerializer(_shown_code, when_used="json")]
