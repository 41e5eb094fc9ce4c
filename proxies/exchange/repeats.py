"""The last request of a connection, in case the next one is the same.

Programs that ask again and again send the same bytes again and again. What those mean depends on nothing but
themselves, if the request has no body and is all that came in; so it is read once, and of the third request
of a kind on, an application gets a copy of what the second one's gave.
"""

from __future__ import annotations

from daskserve.proxies.asgi import Scope

#: Longer requests are not kept: each open connection may hold one.
_MAX_BYTES = 2048


class LastRequest:
    """What one connection received last, if that was one request and nothing else.

    Attributes
    ----------
    begun : dict or None
        The scope of a request that has begun since the last `note`, as long as nobody has changed it.
    data : bytes
        The request; empty if it is not worth keeping.
    scope : dict or None
        Its scope, never given to anybody; None unless the same was received twice.
    """

    __slots__ = ("begun", "data", "scope")

    def __init__(self) -> None:
        self.begun: Scope | None = None
        self.data = b""
        self.scope: Scope | None = None

    def note(self, data: bytes) -> None:
        """Keep what was received; of the first request of its kind only the bytes.

        Empty if it was more, or less, than one request.
        """
        begun, self.begun = self.begun, None
        if begun is None or not data or len(data) > _MAX_BYTES:
            self.data, self.scope = b"", None
        elif data == self.data:
            self.scope = copy_of(begun)
        else:
            self.data, self.scope = data, None


def copy_of(scope: Scope) -> Scope:
    """Return a scope that an application may change, as far as applications change scopes."""
    return {**scope, "headers": scope["headers"].copy()}
