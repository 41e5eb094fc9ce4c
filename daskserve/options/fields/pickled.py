"""The form of pickled code in an option; replicas read it, which do not import pydantic."""

from __future__ import annotations

#: The prefix of a pickled function; base64 follows.
PICKLED = "pickled:"
