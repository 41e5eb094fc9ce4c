"""The messages of an ASGI application's response, joined where they belong together.

An application sends the start of a response, then its body. Most responses have one body message, so both
cross to the worker's loop, and to another process, as one `daskserve.types.WHOLE_RESPONSE`. Nothing is late:
servers pass the start of a response on with the first part of its body anyway.
"""

from __future__ import annotations

from collections.abc import Awaitable

from daskserve.types import DONE, WHOLE_RESPONSE, Message, Send


class JoinedResponse:
    """Holds the start of a response back until its first body message.

    Parameters
    ----------
    send : callable
        Takes the messages that are passed on.

    Attributes
    ----------
    start : Message or None
        The start, while it is held back.
    """

    __slots__ = ("_is_passed_on", "_send", "start")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_passed_on = False
        self.start: Message | None = None

    def send(self, message: Message) -> Awaitable[None]:
        """Take a message of the application; the ``send`` of its interface."""
        start = self.start
        if start is None:
            if self._is_passed_on or message["type"] != "http.response.start":
                return self._send(message)
            self.start = message
            return DONE
        self.start = None
        self._is_passed_on = True
        whole = join(start, message)
        return self._send_both(start, message) if whole is None else self._send(whole)

    async def _send_both(self, start: Message, message: Message) -> None:
        await self._send(start)
        await self._send(message)


def join(start: Message, message: Message) -> Message | None:
    """Return the whole response that two messages make; None if they make none, or not a valid one."""
    if message["type"] != "http.response.body" or message.get("more_body", False) or len(start) > 3:
        return None
    status, body = start["status"], message.get("body", b"")
    if type(body) is not bytes or status in (204, 304):
        return None
    headers = []
    for pair in start.get("headers", ()):
        name, value = pair
        if name.lower() != b"content-length":
            headers.append((name, value))
        elif value != b"%d" % len(body):
            return None
    return {"type": WHOLE_RESPONSE, "status": status, "headers": tuple(headers), "body": body}
