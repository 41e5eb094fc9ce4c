"""A digest of pickled code that is the same whenever the code and its arguments are the same.

Problem: pickle writes an object once and refers to it afterwards, by its identity. Two equal texts may be one
object today and two objects tomorrow, so the same code has different bytes, and would be a new version.
Choice: the digest is of the pickle's instructions, with each reference to a text or a number replaced by its
value, and the other references numbered without them.
"""

from __future__ import annotations

import hashlib
import pickletools
from collections.abc import Iterator, Sequence
from typing import Any

#: Length of a digest, in hexadecimal digits.
DIGITS = 16
#: Size of a pickle up to which its instructions are read, at about 1 MB/s.
READ_BYTES = 1 << 20
#: Instructions that only arrange the bytes of a pickle.
_LAYOUT = frozenset({"FRAME", "PROTO"})
_STORES = frozenset({"MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"})
_LOADS = frozenset({"BINGET", "LONG_BINGET", "GET"})
#: The start of the names of the instructions whose value is in the pickle itself, and has no identity.
_VALUES = ("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES")


def code_digest(parts: Sequence[Any]) -> str:
    """Return the digest of a pickle and of the buffers that belong to it."""
    digest = hashlib.sha256()
    pickled = bytes(parts[0])
    if len(pickled) > READ_BYTES:
        digest.update(pickled)
    else:
        for instruction in _instructions(pickled):
            digest.update(repr(instruction).encode())
    for buffer in parts[1:]:
        digest.update(buffer)
    return digest.hexdigest()[:DIGITS]


def _instructions(pickled: bytes) -> Iterator[Any]:
    memo: list[Any] = []
    objects = 0
    last: Any = None
    argument: Any
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in _LAYOUT:
            continue
        if name in _STORES:
            if last is not None:
                memo.append(last)
            else:
                memo.append(("OBJECT", objects))
                objects += 1
                yield "STORE"
            continue
        last = (name, argument) if name.startswith(_VALUES) else None
        if name in _LOADS:
            found = memo[argument]
            last = found if found[0] != "OBJECT" else None
            yield found
        else:
            yield name, argument
