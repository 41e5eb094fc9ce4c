"""What channels send each other.

Frames (tuples; the first two fields are the kind and the stream's number, chosen by the side that opens)::

    (OPEN,   n, name, incarnation,                        open a stream to an actor over there, with the
        kind, head, payload, has_body, left_s,            seconds left of its deadline, None if it has none;
        patience)                                         seconds that it may wait in line, and has, or None
    (DATA,   n, messages)                                 ASGI (or ``call.*``) messages, either way
    (END,    n, ongoing, queued)                          the handler is done; carries the actor's load
    (ANSWER, n, messages, ongoing, queued)                its last messages, and that it is done
    (ERROR,  n, pickled error)                            the handler raised
    (CANCEL, n)                                           the opener went away
    (CREDIT, n, size)                                     the other side may send so many more bytes

Either way messages go on credit, which is given as they are read, so that a body is not piled up at a slow
reader: a handler may be `daskserve.cluster.channel.streams.WINDOW_BYTES` ahead of the opener; the opener
sends one message of a request ahead, and as much more once the handler has begun to read. So a replica that
refuses a request has not swallowed more of its body than the router keeps to give again.

Streams opened by the dialling side have even numbers, by the accepting side odd ones. Frame kinds that a
side does not know are ignored, so flow control can be added as a frame kind.
"""

from __future__ import annotations

from typing import Any

from distributed.protocol import to_serialize

from daskserve.types import Message, Payload

OPEN, DATA, END, ERROR, CANCEL, CREDIT, ANSWER = range(7)

#: Bytes values from this size on leave the msgpack part of a write, so that they are not copied into it.
OUT_OF_BAND_BYTES = 32 * 1024


def wire_payload(payload: Payload | None) -> Any:
    """Return a payload as a frame carries it."""
    if payload is None:
        return None
    data: Any = payload.data
    if len(data) >= OUT_OF_BAND_BYTES:
        data = to_serialize(data)
    return (data, tuple(map(to_serialize, payload.buffers)) if payload.buffers else ())


def unwire_payload(value: Any) -> Payload | None:
    """Undo `wire_payload`."""
    return None if value is None else Payload(value[0], tuple(value[1]))


def wire_message(message: Message) -> Message:
    """Return a message as a frame carries it."""
    body = message.get("body")
    if body is not None and len(body) >= OUT_OF_BAND_BYTES:
        return {**message, "body": to_serialize(body)}
    payload = message.get("payload")
    if payload is not None:
        return {**message, "payload": wire_payload(payload)}
    return message


def unwire_message(message: Message) -> Message:
    """Undo `wire_message`, in place."""
    if "payload" in message:
        message["payload"] = unwire_payload(message["payload"])
    return message


def is_last(message: Message) -> bool:
    """Whether nothing follows of what a client sends: its body is whole, or it has gone."""
    kind = message["type"]
    if kind.startswith("websocket."):
        return bool(kind == "websocket.disconnect")
    return kind == "http.disconnect" or not message.get("more_body", False)
