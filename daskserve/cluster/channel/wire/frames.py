"""The frames that channels send each other.

A frame is a tuple. Its first two fields are the kind and the stream's number, which the opener chooses::

    (OPEN,   n, name, incarnation,                        open a stream to an actor; left_s: seconds until
        kind, head, payload, has_body, left_s,            its deadline, or None; patience: seconds it may
        patience)                                         wait in the queue and has waited, or None
    (DATA,   n, messages)                                 ASGI or ``call.*`` messages, in either direction
    (END,    n, ongoing, queued)                          the handler is done; carries the actor's load
    (ANSWER, n, messages, ongoing, queued)                the last messages, then as END
    (ERROR,  n, packed error)                             the handler raised
    (CANCEL, n)                                           the opener cancelled the stream
    (CREDIT, n, size)                                     the other side may send that many more bytes
    (OFFER,  n, worker, token, size, ongoing, queued)     a large answer is ready: CREDIT has it sent, CANCEL
                                                          drops it; see
                                                          `daskserve.cluster.channel.kept_results`
    (MEMORY, -1, note)                                    about shared memory; see
                                                          `daskserve.cluster.channel.wire.sharing`

Flow control works by credit in both directions. A reader grants credit as it reads, so a body does not pile
up at a slow reader. A handler may be `daskserve.cluster.channel.streams.WINDOW_BYTES` ahead of the opener.
The opener sends one message of a request ahead, and a window more once the handler starts to read. So a
replica that refuses a request has not consumed more of its body than the router keeps for a retry.

Streams opened by the dialling side have even numbers, those of the accepting side odd ones. Unknown frame
kinds are ignored.

Frames are packed into parts: part 0 is in msgpack and refers to large bytes by number. These are never copied
into it, so a transport can send them directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgpack

from daskserve.common.types import SHARED_BYTES, Message, Payload

Buffer: TypeAlias = bytes | bytearray | memoryview

OPEN, DATA, END, ERROR, CANCEL, CREDIT, ANSWER, MEMORY, OFFER = range(9)

#: The stream's number in frames that concern the whole connection.
CONNECTION = -1

#: Bytes values of at least this size travel outside the msgpack part of a write, to avoid a copy.
OUT_OF_BAND_BYTES = 32 * 1024
#: Parts of at least this size are read into their own memory.
LARGE_BYTES = 32 * 1024
#: Maximum number of parts. The list of their sizes, or any part that is not large, fits into half of a
#: reader's buffer.
MAX_PARTS = 16 * 1024 - 1
#: Larger messages of a request's body are sent in parts.
PART_BYTES = 256 * 1024


class OutOfBand:
    """Marks bytes or a buffer in a frame that travels beside the frame, without a copy."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data


def wire_payload(payload: Payload | None) -> Any:
    """Return a payload in the form that a frame carries."""
    if payload is None:
        return None
    data: Any = payload.data
    if len(data) >= OUT_OF_BAND_BYTES:
        data = OutOfBand(memoryview(data))  # the receiver gets a buffer, which saves a copy
    return (data, tuple(map(OutOfBand, payload.buffers)) if payload.buffers else ())


def unwire_payload(value: Any) -> Payload | None:
    """Undo `wire_payload`."""
    return None if value is None else Payload(value[0], tuple(value[1]))


def wire_message(message: Message) -> Message:
    """Return a message in the form that a frame carries."""
    body = message.get("body")
    if body is not None and len(body) >= OUT_OF_BAND_BYTES:
        return {**message, "body": OutOfBand(body)}
    payload = message.get("payload")
    if payload is not None:
        return {**message, "payload": wire_payload(payload)}
    return message


def unwire_message(message: Message) -> Message:
    """Undo `wire_message`, in place."""
    if "payload" in message:
        message["payload"] = unwire_payload(message["payload"])
    return message


def in_parts(message: Message) -> Iterable[Message]:
    """Split a large body message into several, so that the reader can join them as they arrive."""
    body = message.get("body")
    return (message,) if body is None or len(body) <= PART_BYTES else _parts_of(message, body)


def _parts_of(message: Message, body: bytes) -> Iterator[Message]:
    for at in range(0, len(body), PART_BYTES):
        has_more = at + PART_BYTES < len(body) or message.get("more_body", False)
        yield {**message, "body": body[at : at + PART_BYTES], "more_body": has_more}


def is_last(message: Message) -> bool:
    """Return whether a message is the client's last: its body is complete, or it has disconnected."""
    kind = message["type"]
    if kind.startswith("websocket."):
        return bool(kind == "websocket.disconnect")
    return kind == "http.disconnect" or not message.get("more_body", False)


# ---- packing: one msgpack part, and one part per large bytes value

#: Extension types of msgpack in part 0: a reference to a later part that becomes immutable bytes, a reference
#: that becomes a writable buffer, a buffer that is too small for its own part, and references to shared
#: memory that become immutable bytes or a read-only buffer.
_BYTES, _BUFFER, _SMALL, _SHARED_BYTES, _SHARED_BUFFER = 1, 2, 3, 4, 5
#: If part 0 is larger than this, a packer frees its memory afterwards.
_MAX_KEPT_BYTES = 256 * 1024


class FramePacker:
    """Packs frames for one connection, and keeps the memory of msgpack's packer between messages.

    Each ``msgpack.packb`` takes 256 KiB. With ``MALLOC_TRIM_THRESHOLD_``, which Dask sets for its workers,
    the C library maps and unmaps memory of that size each time: 10 µs for each message.
    """

    def __init__(self) -> None:
        self._values = _Values()
        self._packer = msgpack.Packer(default=self._values.pack)
        self._is_packing = False

    def pack(
        self, frames: Sequence[Any], share: Callable[[memoryview], bytes | None] | None = None
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
        if self._is_packing:  # a finalizer sends something meanwhile
            return FramePacker().pack(frames, share)
        values = self._values
        values.share = share
        self._is_packing = True
        try:
            body = self._packer.pack(frames)
        except UnicodeEncodeError:
            # File names may contain surrogates. They are packed in a second attempt, because replacing them
            # takes longer for each text.
            values.repeat()
            body = msgpack.packb(frames, default=values.pack, unicode_errors="surrogatepass")
        finally:
            large = values.end()
            self._is_packing = False
        if len(body) > _MAX_KEPT_BYTES:
            self._packer = msgpack.Packer(default=values.pack)
        return body, large


class _Values:
    """Packs the values of one message that msgpack does not know."""

    def __init__(self) -> None:
        #: Shares a buffer of the message, or returns None to have it sent.
        self.share: Callable[[memoryview], bytes | None] | None = None
        self._large: list[memoryview] = []
        self._made: list[msgpack.ExtType] = []
        #: The results of an earlier attempt, because a value must not be shared twice.
        self._repeated: Iterator[msgpack.ExtType] = iter(())

    def repeat(self) -> None:
        self._repeated, self._made = iter(self._made), []

    def end(self) -> list[memoryview]:
        large = self._large
        self.share, self._large, self._made, self._repeated = None, [], [], iter(())
        return large

    def pack(self, value: Any) -> msgpack.ExtType:
        found = next(self._repeated, None)
        if found is None:
            found = self._refer(value)
            self._made.append(found)
        return found

    def _refer(self, value: Any) -> msgpack.ExtType:
        large, share = self._large, self.share
        if not isinstance(value, OutOfBand):
            what = "whole number of more than 64 bits" if isinstance(value, int) else type(value).__name__
            raise TypeError(f"a {what} cannot be sent over a channel")
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
                raise ValueError("a message refers to shared memory that was not offered")
            shared = open_shared(data)
            return bytes(shared) if code == _SHARED_BYTES else shared
        part = parts[int.from_bytes(data, "little")]
        return bytes(part) if code == _BYTES else memoryview(part)

    frames: Sequence[Any] = msgpack.unpackb(
        parts[0], use_list=False, strict_map_key=False, ext_hook=refer, unicode_errors="surrogatepass"
    )
    return frames
