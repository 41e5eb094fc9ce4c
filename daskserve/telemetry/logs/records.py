"""A log record with the fields of its replica and request, and one line of the access log.

Both are created in the code that logs, or on the loop of a proxy. Creating one takes less than a microsecond,
because the text is formatted later. Until then, a line of the access log is a plain tuple: Python's garbage
collector stops tracking plain tuples of strings and numbers, but visits instances of `Access` at each
collection. A busy proxy has a large number of lines, so full collections would delay its requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple, TypeAlias

from daskserve.common.formatting import encodable
from daskserve.common.types import split_deployment_tag

#: The logger of the access log.
ACCESS = "daskserve.access"
#: The key of the published settings of the instance's logs, as the value of ``config``.
LOGGING = "logging"
#: The logger name of text that user code prints.
PRINTED = "stdout"
#: Maximum length of a message and of a traceback that is kept in memory.
MAX_TEXT = 8192

Plain: TypeAlias = dict[str, Any]

_PHRASES: Mapping[int, str] = {each.value: each.phrase for each in HTTPStatus} | {
    499: "Client Closed Request"
}


#: The names of the fields of `Tags`.
TAG_NAMES = (
    "application",
    "deployment",
    "replica",
    "request_id",
    "trace_id",
    "route",
    "component",
    "instance",
)


class Tags(NamedTuple):
    """The source of a record; unknown fields are empty."""

    application: str = ""
    deployment: str = ""
    replica: str = ""
    request_id: str = ""
    trace_id: str = ""
    route: str = ""
    #: ``replica``, ``proxy``, ``controller`` or ``worker``.
    component: str = "worker"
    instance: str = ""

    def plain(self) -> dict[str, str]:
        """Return the fields by name."""
        return dict(zip(TAG_NAMES, self, strict=True))

    def mark(self, record: logging.LogRecord) -> None:
        """Add the fields to a record as attributes; attributes that user code has set itself are kept."""
        known = vars(record)
        for name, value in zip(TAG_NAMES, self, strict=True):
            known.setdefault("component_name" if name == "component" else name, value)


class Entry:
    """A log record kept in memory."""

    #: The number of records in this entry.
    count = 1
    __slots__ = ("args", "exception", "level", "levelno", "logger", "msg", "number", "size", "tags", "time")

    def __init__(self, record: logging.LogRecord, tags: Tags) -> None:
        #: The entry's number in the ring.
        self.number = 0
        self.time = record.created
        self.level = record.levelname
        self.levelno = record.levelno
        self.logger = record.name
        msg, args = record.msg, record.args
        size = len(msg) if type(msg) is str else MAX_TEXT + 1
        for each in args if type(args) is tuple else (args,) if args else ():
            # Other values could be large or change, so only their ``str()`` is kept.
            size += len(each) if type(each) is str else 0 if type(each) in _NUMBERS else MAX_TEXT + 1
        if size > MAX_TEXT:
            msg, args = message_text(msg, args), None
            if len(msg) > MAX_TEXT:
                msg = f"{msg[:MAX_TEXT]}..."
            size = len(msg)
        self.msg, self.args = msg, args
        self.tags = tags
        #: The name of the exception's class, until the traceback is formatted.
        kind = record.exc_info[0] if record.exc_info else None
        self.exception = (record.exc_text or "")[-MAX_TEXT:] or ("" if kind is None else kind.__name__)
        #: The total length of the entry's strings.
        self.size = size + len(self.exception)

    @property
    def message(self) -> str:
        """The text, without the exception."""
        return encodable(message_text(self.msg, self.args))

    def plain(self) -> Plain:
        """Return plain values."""
        return {
            "time": self.time,
            "level": self.level,
            "levelno": self.levelno,
            "logger": encodable(self.logger),
            "message": self.message,
            "exception": encodable(self.exception),
            **self.tags.plain(),
        }

    def rows(self) -> Iterator[Plain]:
        """Yield the plain values, with the entry's number."""
        yield {**self.plain(), "number": self.number}


#: The fields of an `Access`, as a plain tuple.
AccessLine: TypeAlias = tuple[
    float,
    str,
    bytes,
    bytes,
    int,
    float,
    tuple[str, int] | None,
    str,
    str,
    str,
    str,
    str,
    str,
    str,
    str,
]


class Access(NamedTuple):
    """One ended request: an HTTP request of a proxy, or a handle call in a replica.

    Attributes
    ----------
    method : str
        The method of HTTP, ``WebSocket``, or ``CALL``.
    target : bytes
        The path with its query as the client sent it, or the name of the method that was called.
    status : int
        The HTTP status; for a call 200 if it returned, 500 if it raised, and 499 if it was cancelled.
    backend : str
        The tag of the deployment.
    proxy : str
        The name of the proxy in the logs of its process.
    """

    time: float
    method: str
    target: bytes
    query: bytes
    status: int
    seconds: float
    client: tuple[str, int] | None = None
    http_version: str = ""
    request_id: str = ""
    trace_id: str = ""
    route: str = ""
    backend: str = ""
    replica: str = ""
    proxy: str = ""
    instance: str = ""

    @property
    def message(self) -> str:
        """The line, in uvicorn's format for HTTP and in Ray Serve's for calls."""
        return message_of(self)

    @property
    def path(self) -> str:
        """The target as a printable string."""
        return printable(self.target)

    @property
    def tags(self) -> Tags:
        """The source of the line."""
        application, deployment = split_deployment_tag(self.backend) if self.backend else ("", "")
        component = "replica" if self.replica else "proxy"
        return Tags(
            application,
            deployment,
            self.replica,
            self.request_id,
            self.trace_id,
            self.route,
            component,
            self.instance,
        )

    def plain(self) -> Plain:
        """Return plain values, as for a record."""
        return {
            "time": self.time,
            "level": "INFO",
            "levelno": logging.INFO,
            "logger": ACCESS,
            "message": self.message,
            "exception": "",
            **self.tags.plain(),
            "access": self.facts(),
        }

    def facts(self) -> Plain:
        """Return the fields that only lines of the access log have."""
        return {
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_s": round(self.seconds, 6),
            "client": None if self.client is None else self.client[0],
        }


#: The result of a call as shown in its line, by status.
CALL_RESULTS: Mapping[int, str] = {200: "OK", 499: "CANCELLED", 500: "ERROR"}


def message_of(access: AccessLine) -> str:
    """Return the message of a line of the access log; see `Access.message`."""
    # Accessed by index, because creating an `Access` takes as long as the message.
    method, target, query, status, client = access[1], access[2], access[3], access[4], access[6]
    text = printable(target + b"?" + query if query else target)
    if method == "CALL":
        return f"CALL {text} {CALL_RESULTS.get(status, 'ERROR')} {1000 * access[5]:.1f}ms"
    before, after = around_target(method, access[7], status)
    return f"{before}{text}{after}" if client is None else f"{client[0]}:{client[1]}{before}{text}{after}"


@lru_cache(1024)
def around_target(method: str, version: str, status: int) -> tuple[str, str]:
    """Return the parts of a request's message before and after the target."""
    protocol = f" HTTP/{version}" if method != "WebSocket" else ""
    return f' - "{method} ', f'{protocol}" {status} {_PHRASES.get(status, "")}'.rstrip()


_NUMBERS = frozenset({int, float, bool, type(None)})


def message_text(msg: Any, args: Any) -> str:
    """Return the message of a record, or a note that the message cannot be formatted."""
    try:
        return str(msg) % args if args else str(msg)
    except Exception as error:  # raised by arguments that do not fit the message, or by the message itself
        kind = type(error).__name__
        is_text = type(msg) is str
        return (
            f"{msg} ({kind} in its arguments)" if is_text else f"<{type(msg).__name__}: {kind} in its text>"
        )


def printable(text: bytes) -> str:
    """Return text from a client in a form that is safe in a log line."""
    found = text.decode("latin-1")
    # A client must not be able to add lines, or to control a terminal.
    return found if found.isascii() and found.isprintable() else found.encode("unicode_escape").decode()
