"""A digest of pickled code that is the same whenever the code and its arguments are the same.

Problem: pickle writes an object once and refers to it afterwards, by its identity. Two equal texts may be one
object today and two objects tomorrow, and a set has another order in each process. So the same code has
different bytes, and would be a new version. Choice: the digest is of the pickle's instructions, with each
reference to a text replaced by its value, the other references numbered without them, and the texts and
numbers of a set sorted.
"""

from __future__ import annotations

import hashlib
import pickletools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from daskserve.internals.cloudpickle import class_id, set_class_id

#: Length of a digest, in hexadecimal digits.
DIGITS = 16
#: Size of a pickle up to which its instructions are read, at about 1 MB/s.
READ_BYTES = 1 << 20
_ADDRESS = re.compile(r":(\d{6,})")
#: Instructions that only arrange the bytes of a pickle.
_LAYOUT = frozenset({"FRAME", "PROTO"})
_STORES = frozenset({"MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"})
_LOADS = frozenset({"BINGET", "LONG_BINGET", "GET"})
#: Instructions that put text, bytes or numbers on the stack, by the start of their names.
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES")
_NUMBERS = ("BININT", "LONG", "BINFLOAT", "NEWTRUE", "NEWFALSE", "NONE")
#: Instructions that take the items since the last MARK: into a set, or into something with an order.
_FILLS_SET = frozenset({"ADDITEMS", "FROZENSET"})
_FILLS_OTHER = frozenset({"TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS", "OBJ", "POP_MARK", "INST"})


def code_digest(
    parts: Sequence[Any], classes: Iterable[type] = (), aliases: Mapping[str, str] | None = None
) -> str:
    """Return the digest of a pickle and of the buffers that belong to it.

    Parameters
    ----------
    classes
        The classes in the pickle.
    aliases
        Texts to read as other texts.
    """
    aliases = aliases or {}
    names = {str(id(cls)): f"{cls.__module__}.{cls.__qualname__}" for cls in classes}

    def read(text: str) -> str:
        # The schemas of pydantic name models by their addresses.
        return _ADDRESS.sub(lambda found: f":{names.get(found[1], found[1])}", aliases.get(text, text))

    digest = hashlib.sha256()
    pickled = bytes(parts[0])
    if len(pickled) > READ_BYTES:
        digest.update(pickled)
    else:
        for instruction in _instructions(pickled, read):
            digest.update(repr(instruction).encode())
    for buffer in parts[1:]:
        digest.update(buffer)
    return digest.hexdigest()[:DIGITS]


def settle_ids(classes: Mapping[type, bool], parts: Sequence[Any]) -> None:
    """Give classes that are new ids that depend on the pickle they are in, and not on chance.

    Then the same program has the same code each time it runs.
    """
    new = [cls for cls, is_new in classes.items() if is_new]
    aliases = {class_id(cls): str(number) for number, cls in enumerate(new)}
    digest = code_digest(parts, classes, aliases)
    for number, cls in enumerate(new):
        set_class_id(cls, f"{digest}-{number}")


def _instructions(pickled: bytes, read: Callable[[str], str]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    memo: list[tuple[str, Any]] = []
    marks: list[int] = []
    objects = 0
    argument: Any
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in _STORES:
            text = found[-1]
            if not text[0].startswith(_TEXTS):
                text = ("OBJECT", objects)
                objects += 1
                found.append(("STORE", None))
            memo.append(text)
            continue
        if name == "MARK":
            marks.append(len(found) + 1)
        elif name in _FILLS_SET or name in _FILLS_OTHER:
            start = marks.pop()
            if name in _FILLS_SET and all(each[0].startswith(_TEXTS + _NUMBERS) for each in found[start:]):
                found[start:] = sorted(found[start:], key=repr)
        if name in _LOADS:
            found.append(memo[argument])
        elif name not in _LAYOUT:
            found.append((name, read(argument) if isinstance(argument, str) else argument))
    return found
