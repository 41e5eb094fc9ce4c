"""Packing of frames into parts: one msgpack part, and one part per large bytes value; pure.

Part 0 refers to the large parts by number. Large bytes are never copied into it, so a transport can send
them directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from daskserve.cluster.channel.wire.parts import LARGE_BYTES, MAX_PARTS, Buffer, OutOfBand
from daskserve.common.types import SHARED_BYTES

#: Extension types of msgpack in part 0: a reference to a later part that becomes immutable bytes, a reference
#: that becomes a writable buffer, a buffer that is too small for its own part, and references to shared
#: memory that become immutable bytes or a read-only buffer.
_BYTES, _BUFFER, _SMALL, _SHARED_BYTES, _SHARED_BUFFER = 1, 2, 3, 4, 5


def pack(
    frames: Sequence[Any], share: Callable[[memoryview], bytes | None] | None = None
) -> tuple[bytes, list[memoryview]]:
    """Return part 0 and the large parts.

    Parameters
    ----------
    share
        Returns a reference to shared memory for a buffer of at least `SHARED_BYTES`, or None to send it.

    Raises
    ------
    TypeError, ValueError, OverflowError
        A frame holds a value that cannot be sent.
    """
    large: list[memoryview] = []

    def refer(value: Any) -> msgpack.ExtType:
        if not isinstance(value, OutOfBand):
            raise TypeError(f"a {type(value).__name__} cannot cross a channel")
        view = memoryview(value.data)
        if view.nbytes < LARGE_BYTES or len(large) + 1 >= MAX_PARTS:
            return msgpack.ExtType(_SMALL, view.tobytes())
        is_bytes = isinstance(value.data, bytes)
        view = view.cast("B")
        if view.nbytes >= SHARED_BYTES and share is not None:
            reference = share(view)
            if reference is not None:
                return msgpack.ExtType(_SHARED_BYTES if is_bytes else _SHARED_BUFFER, reference)
        large.append(view)
        code = _BYTES if is_bytes else _BUFFER
        return msgpack.ExtType(code, len(large).to_bytes(4, "little"))

    return msgpack.packb(frames, default=refer), large


def unpack(
    parts: Sequence[Buffer], open_shared: Callable[[bytes], memoryview] | None = None
) -> Sequence[Any]:
    """Return the frames of a message. Its large parts must be writable and not shared.

    Parameters
    ----------
    open_shared
        Returns the buffer for a reference to shared memory.
    """

    def refer(code: int, data: bytes) -> Any:
        if code == _SMALL:
            return memoryview(bytearray(data))
        if code in (_SHARED_BYTES, _SHARED_BUFFER):
            if open_shared is None:
                raise ValueError("a message refers to shared memory, which was not offered")
            shared = open_shared(data)
            return bytes(shared) if code == _SHARED_BYTES else shared
        part = parts[int.from_bytes(data, "little")]
        return bytes(part) if code == _BYTES else memoryview(part)

    frames: Sequence[Any] = msgpack.unpackb(parts[0], use_list=False, strict_map_key=False, ext_hook=refer)
    return frames
