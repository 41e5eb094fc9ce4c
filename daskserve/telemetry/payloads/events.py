"""One sampled request as CloudEvents: one line for its body, and one for the body of its response.

The loop of the replica only keeps bytes (`Sample`). The writing thread creates the events from these bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from daskserve.common.strict_json import strict_json
from daskserve.common.types import WHOLE_RESPONSE, Message, Payload

#: The types of the first and the second event of a request.
REQUEST, RESPONSE = "daskserve.request", "daskserve.response"
#: The status of a request whose caller disconnected, and of a request whose deadline passed.
CALLER_GONE, TOO_LATE = 499, 408
#: The content type of the arguments and results of Python calls.
JSON = "application/json"


class Body:
    """The beginning of a body, of a stream, or of the messages of a WebSocket."""

    __slots__ = ("data", "left", "payloads", "size")

    def __init__(self, max_bytes: int) -> None:
        self.left = max_bytes
        self.data = bytearray()
        #: The pickled values of Python calls, which are useful only if complete.
        self.payloads: list[Payload] = []
        self.size = 0

    def add(self, part: Any) -> None:
        """Keep as much of a part of the body as there is room for."""
        found = part.encode("utf-8", "replace") if isinstance(part, str) else part
        self.size += len(found)
        if self.left > 0:
            kept = found[: self.left]
            self.left -= len(kept)
            self.data += kept

    def add_payload(self, payload: Any) -> None:
        """Keep a copy of a pickled value, if there is room, because its buffers may be reused."""
        if not isinstance(payload, Payload):
            return  # a large result stays in the replica's process
        size = payload.nbytes
        self.size += size
        if size > self.left:
            self.left = 0
            return
        self.left -= size
        buffers = tuple(bytearray(memoryview(each).cast("B")) for each in payload.buffers)
        self.payloads.append(Payload(bytes(payload.data), buffers))

    @property
    def is_whole(self) -> bool:
        """Whether the kept body is complete."""
        return self.size <= len(self.data) + sum(each.nbytes for each in self.payloads)


@dataclass(slots=True)
class Sample:
    """One request and its response, recorded on the loop of the replica while they pass through it."""

    time: float
    max_bytes: int
    kind: str
    head: Mapping[str, Any]
    request: Body = field(init=False)
    response: Body = field(init=False)
    status: int = 0
    content_type: str = ""
    error: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.request, self.response = Body(self.max_bytes), Body(self.max_bytes)

    def received(self, message: Message) -> None:
        """Keep an incoming message of the client."""
        if message["type"] == "http.request":
            self.request.add(message.get("body", b""))
        elif message["type"] == "websocket.receive":
            self.request.add(message.get("bytes") or message.get("text") or b"")

    def sent(self, message: Message) -> None:
        """Keep an outgoing message of the replica."""
        # A WebSocket that is refused gets an HTTP response.
        kind = message["type"].removeprefix("websocket.http.").removeprefix("http.")
        if kind in ("response.start", WHOLE_RESPONSE):
            self.status = message["status"]
            self.content_type = _content_type(message.get("headers", ()))
        if kind in ("response.body", WHOLE_RESPONSE):
            self.response.add(message.get("body", b""))
        elif kind in ("call.result", "call.item"):
            self.status = 200
            self.response.add_payload(message["payload"])
        elif kind == "websocket.send":
            self.response.add(message.get("bytes") or message.get("text") or b"")
        elif kind == "websocket.accept":
            self.status = 101
        elif kind == "websocket.close":
            self.status = self.status or 403  # the WebSocket was not accepted

    @property
    def nbytes(self) -> int:
        """The approximate size of the sample in memory."""
        bodies = (self.request, self.response)
        return 2000 + sum(len(each.data) + sum(one.nbytes for one in each.payloads) for each in bodies)


@dataclass(frozen=True, slots=True)
class Origin:
    """The replica whose requests are sampled."""

    instance: str
    application: str
    deployment: str
    replica: str


def events_of(sample: Sample, origin: Origin, mode: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a request, with the attributes of CloudEvents 1.0 and daskserve's own."""
    head = sample.head
    ours = head.get("extensions", {}).get("daskserve", {})
    request_id = str(ours.get("request_id") or head.get("request_id") or "")
    method = head.get("method") or ("__call__" if sample.kind == "call" else "GET")
    common: dict[str, Any] = {
        "specversion": "1.0",
        "source": f"/{origin.instance}/{origin.application}/{origin.deployment}/{origin.replica}",
        "time": _time(sample.time),
        "requestid": request_id,
        "application": origin.application,
        "deployment": origin.deployment,
        "replica": origin.replica,
        "kind": sample.kind,
        "method": method,
    }
    if sample.kind != "call":
        # The query and the headers are left out, because they may contain a token.
        common |= {"path": head.get("path", ""), "route": ours.get("route", "")}
    if mode != "response":
        kind = JSON if sample.kind == "call" else _content_type(head.get("headers", ()))
        yield {**common, "id": f"{request_id}-request", "type": REQUEST, **_data(sample.request, kind)}
    if mode != "request":
        kind = JSON if sample.kind == "call" else sample.content_type
        yield {
            **common,
            "time": _time(sample.time + sample.seconds),
            "id": f"{request_id}-response",
            "type": RESPONSE,
            "status": sample.status,
            "durationms": round(1000 * sample.seconds, 3),
            **({"error": sample.error} if sample.error else {}),
            **_data(sample.response, kind, is_result=True),
        }


def _data(body: Body, content_type: str, *, is_result: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"size": body.size}
    if not body.is_whole:
        found["truncated"] = True
    if content_type:
        found["datacontenttype"] = content_type
    if body.payloads:
        return found | {"data": _values_of(body, is_result=is_result)}
    if not body.data:
        return found
    try:
        text = body.data.decode()
    except UnicodeDecodeError as error:
        if body.is_whole or error.start < len(body.data) - 3:
            return found | {"data_base64": base64.b64encode(body.data).decode()}
        text = body.data[: error.start].decode()  # the body was cut within a character
    if "json" in content_type and body.is_whole:
        try:
            return found | {"data": json.loads(text)}
        except (ValueError, RecursionError):
            pass  # not JSON, so keep it as text
    return found | {"data": text}


def _values_of(body: Body, *, is_result: bool) -> Any:
    values = [each.load() for each in body.payloads]
    if not is_result:
        args, kwargs = values[0]
        return {"args": list(args), "kwargs": kwargs}
    return values[0] if len(values) == 1 else values


def line_of(event: Mapping[str, Any]) -> bytes:
    """Return an event as a line; values of other types than JSON's are their ``repr``."""
    return f"{strict_json(event)}\n".encode()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _content_type(headers: Any) -> str:
    for name, value in headers:
        if bytes(name).lower() == b"content-type":
            return bytes(value).decode("latin-1").lower()
    return ""
