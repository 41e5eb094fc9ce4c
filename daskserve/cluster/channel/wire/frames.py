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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from daskserve.cluster.channel.wire.parts import OutOfBand
from daskserve.common.types import Message, Payload

OPEN, DATA, END, ERROR, CANCEL, CREDIT, ANSWER, MEMORY, OFFER = range(9)

#: The stream's number in frames that concern the whole connection.
CONNECTION = -1

#: Bytes values of at least this size travel outside the msgpack part of a write, to avoid a copy.
OUT_OF_BAND_BYTES = 32 * 1024
#: Larger messages of a request's body are sent in parts.
PART_BYTES = 256 * 1024


def wire_payload(payload: Payload | None) -> Any:
    """Return a payload in the form that a frame carries."""
    if payload is None:
        return None
    data: Any = payload.data
    if len(data) >= OUT_OF_BAND_BYTES:
        data = OutOfBand(memoryview(data))  # arrives as a buffer, which saves a copy
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
    """Return a message of a body as several if it is large: the reader then joins them as they come."""
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
