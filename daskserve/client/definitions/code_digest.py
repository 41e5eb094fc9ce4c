"""A digest of pickled code that is the same whenever the code and its arguments are the same.

Problem: pickle writes an object once and refers to it afterwards, by its identity. Two equal strings may be
one object today and two objects tomorrow, and a set has another order in each process. So the same code has
different bytes, and would be a new version.

Choice: the digest covers the pickle's opcodes, normalised: references to strings become the strings; other
references are renumbered; strings and numbers in a set are sorted; notebook cell numbers, which change
whenever a cell runs again, are dropped.
"""

from __future__ import annotations

import hashlib
import pickle
import pickletools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

from daskserve.internals.cloudpickle import NO_FILE, class_id, has_id, set_class_id
from daskserve.internals.ipython import CELL

#: Length of a digest, in hexadecimal digits.
DIGITS = 16
#: Maximum size of a pickle whose opcodes are read, at about 2 MB/s.
READ_BYTES = 1 << 20
#: Whether a class may have the same id as an equal class of this process. A worker that builds an application
#: may have loaded the same code for a replica before. The two classes are equal, and must not count as
#: different versions.
shares_ids: ContextVar[bool] = ContextVar("daskserve_shares_ids", default=False)
_ADDRESS = re.compile(rb":(\d{6,})")
_CELL = re.compile(CELL.pattern.encode())

#: Keys in pickled code whose values name the module that defines the code, not a module that it uses.
_ORIGINS = frozenset({"__module__", "__name__", "__package__"})
#: Opcodes without a meaning for the object.
_LAYOUT = frozenset({"FRAME", "PROTO"})
_LOADS = frozenset({"BINGET", "LONG_BINGET"})
#: Opcodes that put a string or bytes on the stack, each with the size of the length before it.
_TEXTS: Mapping[int, int] = {
    pickle.SHORT_BINUNICODE[0]: 1,
    pickle.BINUNICODE[0]: 4,
    pickle.BINUNICODE8[0]: 8,
    pickle.SHORT_BINBYTES[0]: 1,
    pickle.BINBYTES[0]: 4,
    pickle.BINBYTES8[0]: 8,
}
#: Opcodes of items that are sorted within a set: strings and numbers.
_SORTED = frozenset(_TEXTS) | frozenset(
    pickle.BININT
    + pickle.BININT1
    + pickle.BININT2
    + pickle.LONG1
    + pickle.LONG4
    + pickle.BINFLOAT
    + pickle.NEWTRUE
    + pickle.NEWFALSE
    + pickle.NONE
)
#: The opcodes that put the items since the last MARK into a set.
_FILLS_SET = frozenset({"ADDITEMS", "FROZENSET"})
_FILLS = _FILLS_SET | {"TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS", "OBJ", "POP_MARK"}


def code_digest(
    parts: Sequence[Any], classes: Iterable[type] = (), aliases: Mapping[str, str] | None = None
) -> str:
    """Return the digest of a pickle and of the buffers that belong to it.

    Parameters
    ----------
    classes
        The classes in the pickle.
    aliases
        Strings in the pickle, and the strings that replace them for the digest.
    """
    digest = hashlib.sha256()
    pickled = bytes(parts[0])
    if len(pickled) > READ_BYTES:
        digest.update(pickled)
    else:
        digest.update(b"".join(_instructions(pickled, _reader(pickled, classes, aliases or {}))))
    for buffer in parts[1:]:
        digest.update(buffer)
    return digest.hexdigest()[:DIGITS]


def settle_ids(classes: Mapping[type, bool], pack: Callable[[type, dict[type, bool]], Sequence[Any]]) -> None:
    """Give new classes ids that depend only on their own code.

    Then a program has the same digest each time it runs and in each worker. The digest does not depend on
    random values, on arguments, or on other classes in the same pickle.

    Parameters
    ----------
    pack
        Returns the parts of the pickle of a class alone, and adds its classes to a dictionary.
    """
    digests: Counter[str] = Counter()
    for cls in [each for each, is_new in classes.items() if is_new]:
        inside: dict[type, bool] = {}
        parts = pack(cls, inside)
        # Type variables have ids, like classes.
        aliases = {
            class_id(each): f"{each.__module__}.{getattr(each, '__qualname__', each.__name__)}"
            for each in inside
            if has_id(each)
        }
        digest = code_digest(parts, inside, aliases)
        while not set_class_id(cls, f"{digest}-{digests[digest]}", shares=shares_ids.get()):
            digests[digest] += 1  # an equal class of this process has this id
        digests[digest] += 1


def _reader(
    pickled: bytes, classes: Iterable[type], aliases: Mapping[str, str]
) -> Callable[[bytes], bytes] | None:
    """Return the function that replaces the parts of strings that differ between runs; None if there are no
    such parts."""
    if not aliases and not _ADDRESS.search(pickled) and not _CELL.search(pickled):
        return None
    names = {
        str(id(cls)).encode(): f"{cls.__module__}.{getattr(cls, '__qualname__', cls)}".encode()
        for cls in classes
    }
    others = {text.encode(): other.encode() for text, other in aliases.items()}

    def read(text: bytes) -> bytes:
        if _CELL.fullmatch(text):
            return NO_FILE.encode()
        # The schemas of pydantic name models by their addresses, and generic ones also by the addresses of
        # their arguments: `shop.Page:94020011[int:94020022]`.
        is_model = any(each in names for each in _ADDRESS.findall(text))
        return _ADDRESS.sub(
            lambda found: b":" + names.get(found[1], b"" if is_model else found[1]), others.get(text, text)
        )

    return read


def _instructions(pickled: bytes, read: Callable[[bytes], bytes] | None) -> list[bytes]:
    found: list[bytes] = []
    #: The value of each reference: the string itself, or the number of another object.
    memo: list[bytes] = []
    marks: list[int] = []
    objects = 0
    steps = list(pickletools.genops(pickled))
    ends = [*(at or 0 for _, _, at in steps[1:]), len(pickled)]
    for (opcode, argument, at), end in zip(steps, ends, strict=True):
        step, name = pickled[at:end], opcode.name
        if name == "MEMOIZE":
            text = found[-1]
            if text[0] not in _TEXTS:
                text = b"\0%d\n" % objects
                objects += 1
                found.append(step)
            memo.append(text)
        elif name in _LOADS:
            found.append(memo[cast(int, argument)])
        elif name not in _LAYOUT:
            if name == "MARK":
                marks.append(len(found) + 1)
            elif name in _FILLS:
                first = marks.pop()
                if name in _FILLS_SET and all(each[0] in _SORTED for each in found[first:]):
                    found[first:] = sorted(found[first:])
            elif read is not None and step[0] in _TEXTS:
                text = read(step[1 + _TEXTS[step[0]] :])
                step = b"%c%d\n%b" % (step[0], len(text), text)
            found.append(step)
    return found


def names_one_of(pickled: bytes, modules: Collection[str]) -> bool:
    """Return whether pickled code refers by name to one of these modules."""
    if len(pickled) > READ_BYTES:
        return True
    memo: list[Any] = []
    text = before = ""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "MEMOIZE":
            memo.append(text)
            continue
        if opcode.name in ("BINGET", "LONG_BINGET"):
            argument = memo[int(argument or 0)]
        before, text = text, argument if isinstance(argument, str) else ""
        # Also in an import path, which may be an argument.
        if text.partition(":")[0] in modules and before not in _ORIGINS:
            return True
    return False
