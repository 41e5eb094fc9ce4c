"""Packing of frames into parts: one msgpack part, and one part per large bytes value; pure.

Part 0 refers to the large parts by number. Large bytes are never copied into it, so a transport can send
them directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from daskserve.cluster.channel.parts import LARGE_BYTES, MAX_PARTS, Buffer
from daskserve.cluster.distributed_internals import Serialize

#: Extension types of msgpack in part 0: a reference to a later part that becomes immutable bytes, a reference
#: that becomes a writable buffer, and a buffer that is too small for its own part.
_BYTES, _BUFFER, _SMALL = 1, 2, 3


def pack(frames: Sequence[Any]) -> tuple[bytes, list[memoryview]]:
    """Return part 0 and the large parts.

    Raises
    ------
    TypeError, ValueError, OverflowError
        A frame holds a value that cannot be sent.
    """
    large: list[memoryview] = []

    def refer(value: Any) -> msgpack.ExtType:
        if not isinstance(value, Serialize):
            raise TypeError(f"a {type(value).__name__} cannot cross a channel")
        view = memoryview(value.data)
        if view.nbytes < LARGE_BYTES or len(large) + 1 >= MAX_PARTS:
            return msgpack.ExtType(_SMALL, view.tobytes())
        large.append(view.cast("B"))
        code = _BYTES if isinstance(value.data, bytes) else _BUFFER
        return msgpack.ExtType(code, len(large).to_bytes(4, "little"))

    return msgpack.packb(frames, default=refer), large


def unpack(parts: Sequence[Buffer]) -> Sequence[Any]:
    """Return the frames of a message. Its large parts must be writable and not shared."""

    def refer(code: int, data: bytes) -> Any:
        if code == _SMALL:
            return memoryview(bytearray(data))
        part = parts[int.from_bytes(data, "little")]
        return bytes(part) if code == _BYTES else memoryview(part)

    frames: Sequence[Any] = msgpack.unpackb(parts[0], use_list=False, strict_map_key=False, ext_hook=refer)
    return frames
