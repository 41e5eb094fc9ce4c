"""Functions as the values of options: in records and messages, they are text."""

from __future__ import annotations

#: What a pickled function begins with, followed by base64.
PICKLED = "pickled:"
