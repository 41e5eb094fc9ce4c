"""Functions as the values of options; in records and messages, they are strings."""

from __future__ import annotations

#: The prefix of a pickled function; base64 follows.
PICKLED = "pickled:"
