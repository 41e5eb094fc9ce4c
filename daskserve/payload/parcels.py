"""User code with large constructor arguments, and the label that replaces it in messages and records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgpack

from daskserve.common.types import SHARED_BYTES, Payload
from daskserve.payload.importing import ModuleVersions
from daskserve.payload.pickling import Substitute, dump_code, load_bytes

#: The first bytes of a parcel's label; pickles begin differently.
LABEL = b"parcel:"
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Parcel:
    """A pickled callable with large constructor arguments, which is sent outside of messages and records.

    Problem: 200 MB of weights would pass through the event loops of the controller and of every replica's
    start. Choice: messages and records contain only the short label of a parcel. The content goes from the
    client to the scheduler's process, and from there to each replica, through shared memory if the processes
    are on one machine. The content begins with the digest, so a reader can verify that it has opened the
    right memory. The pickle and its buffers follow, each at a multiple of `ALIGNMENT`.

    Attributes
    ----------
    digest : str
        The digest of the parts, in hexadecimal.
    sizes : tuple of int
        The sizes of the parts: the pickle and its buffers.
    """

    digest: str
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[Any]) -> Self:
        """Return the label of some parts."""
        sizes = tuple(memoryview(each).nbytes for each in parts)
        digest = hashlib.sha256(repr(sizes).encode())
        for each in parts:
            digest.update(each)
        return cls(digest.hexdigest(), sizes)

    @classmethod
    def labelled(cls, code: bytes) -> Self | None:
        """Return the parcel that a label names; None if the bytes are the code itself."""
        if not code.startswith(LABEL):
            return None
        digest, sizes = msgpack.unpackb(code[len(LABEL) :])
        return cls(digest, tuple(sizes))

    def label(self) -> bytes:
        """Return the bytes that replace the parcel's content."""
        return LABEL + bytes(msgpack.packb((self.digest, self.sizes)))

    @property
    def head(self) -> bytes:
        """The first bytes of the content."""
        return bytes.fromhex(self.digest)

    @property
    def size_bytes(self) -> int:
        """The size of the content."""
        return self._ends()[-1]

    def split(self, content: memoryview) -> list[memoryview]:
        """Split the content into its parts."""
        starts = self.starts()
        return [content[start : start + size] for start, size in zip(starts, self.sizes, strict=True)]

    def starts(self) -> list[int]:
        """Return the offset of each part in the content."""
        return self._ends()[:-1]

    def _ends(self) -> list[int]:
        # Each part starts where the one before it ends, rounded up.
        ends = [ALIGNMENT]
        for size in self.sizes:
            ends.append(-(-(ends[-1] + size) // ALIGNMENT) * ALIGNMENT)
        return ends


def pack_code(
    value: Any,
    substitution: Callable[[], Substitute] | None = None,
    classes: dict[type, bool] | None = None,
) -> tuple[bytes, tuple[Any, ...]]:
    """Pickle user code; return the pickle or the label of its parcel, and the parcel's parts.

    The other arguments are those of `dump_code`.
    """
    payload = dump_code(value, substitution, classes)
    if payload.nbytes < SHARED_BYTES:
        return bytes(payload.data), ()
    parts = (payload.data, *payload.buffers)
    return Parcel.of(parts).label(), parts


def unpack_code(code: bytes, parts: Sequence[Any], *, is_exact: bool = False) -> Any:
    """Unpickle the result of `pack_code`.

    ``is_exact`` applies to the modules that the code names; see
    `daskserve.payload.importing.import_definition`.
    """
    found = Payload(parts[0], tuple(parts[1:])).load() if parts else load_bytes(code)
    for each in found:
        if isinstance(each, ModuleVersions):
            each.check(is_exact=is_exact)
    return found
