"""Code as the value of an option: in records and messages, it is pickled."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from pydantic import PlainSerializer

#: The prefix of a pickled function; base64 follows.
PICKLED = "pickled:"


def _as_shown(value: Any) -> Any:
    if callable(value):
        return getattr(value, "__qualname__", repr(value))
    if isinstance(value, str) and value.startswith(PICKLED):
        value = value.encode()
    return f"pickled code #{hashlib.sha256(value).hexdigest()[:8]}" if isinstance(value, bytes) else value


#: The type of an option that may be code. In JSON, which people read, a function is its name, and pickled code,
#: whose bytes are not text, a digest.
Code = Annotated[Any, PlainSerializer(_as_shown, when_used="json")]
