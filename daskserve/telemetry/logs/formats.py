"""Log records as text and as JSON, one per line."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any

from daskserve.common.formatting import encodable
from daskserve.common.strict_json import strict_json
from daskserve.common.types import split_deployment_tag
from daskserve.telemetry.logs.records import (
    ACCESS,
    TAG_NAMES,
    Access,
    AccessLine,
    Plain,
    Tags,
    around_target,
    message_of,
    message_text,
    printable,
)
from daskserve.telemetry.logs.settings import LogSettings

#: The attributes that Python's `logging` gives every record.
STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
#: The attributes that `daskserve.telemetry.logs.records.Tags.mark` gives a record.
_OURS = frozenset((*TAG_NAMES, "component_name"))
#: The milliseconds as strings.
_THREE = tuple(f"{number:03d}" for number in range(1000))
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")


def clock(seconds: float) -> str:
    """Return a time in the format of Ray Serve's logs: local, with milliseconds."""
    whole = int(seconds)
    return f"{_second(whole)},{int(1000 * (seconds - whole)):03d}"


@lru_cache(8)  # formatting a time takes longer than the rest of a line
def _second(whole: int) -> str:
    return f"{datetime.fromtimestamp(whole):%Y-%m-%d %H:%M:%S}"


def place_of(application: str, deployment: str, replica: str) -> str:
    """Return the source of a record in short form: ``app/Model#abc``."""
    if not replica:
        return "/".join(filter(None, (application, deployment)))
    return f"{application}/{deployment}#{replica.rpartition('#')[2]}"


def without_control(text: str) -> str:
    """Return a string without control characters for terminals; line breaks and tabs stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def text_of(record: logging.LogRecord, tags: Tags, settings: LogSettings) -> str:
    """Return a record as text, with its traceback."""
    head = f"{record.levelname} {clock(record.created)}"
    place = place_of(tags.application, tags.deployment, tags.replica) or tags.component
    more = "".join(
        f" {name}={getattr(record, name, None)}" for name in settings.additional_log_standard_attrs
    )
    request = f" {tags.request_id}" if tags.request_id else ""
    text = f"{head} {place}{request}{more} -- {_message(record)}"
    found = traceback_of(record)
    return f"{text}\n{found}" if found else text


def json_of(record: logging.LogRecord, tags: Tags, settings: LogSettings) -> str:
    """Return a record as a JSON object, with the attributes that user code has given it."""
    found: dict[str, Any] = {
        "levelname": record.levelname,
        "asctime": clock(record.created),
        "timestamp_ns": int(record.created * 1e9),
        "message": _message(record),
        "logger": record.name,
        "filename": record.filename,
        "lineno": record.lineno,
        "process": record.process,
        **_of_tags(tags),
    }
    for name, value in vars(record).items():
        # If user code has set an attribute with daskserve's name, its value is kept.
        is_set = name in _OURS and value not in (None, "")
        if is_set or (name not in STANDARD and name not in _OURS and name not in found):
            found[name] = value
    for name in settings.additional_log_standard_attrs:
        found.setdefault(name, getattr(record, name, None))
    text = traceback_of(record)
    if text:
        found["exc_text"] = text
    return strict_json(found)


def access_text(access: AccessLine) -> str:
    """Return a line of the access log: as uvicorn formats it, or for calls as a replica's other records."""
    at, request_id, backend, replica = access[0], access[8], access[11], access[12]
    if not replica:
        return f"INFO:     {message_of(access)}"
    return f"INFO {clock(at)} {_place_of_call(backend, replica)} {request_id} -- {message_of(access)}"


@lru_cache(1024)
def _place_of_call(backend: str, replica: str) -> str:
    return place_of(*(split_deployment_tag(backend) if backend else ("", "")), replica)


def access_json(access: AccessLine) -> str:
    """Return a line of the access log as a JSON object.

    The line is joined from parts that many lines share, because encoding a dictionary takes ten times as
    long.
    """
    at, method, target, query, status, seconds, client, version, request_id, trace_id = access[:10]
    text = (target + b"?" + query if query else target).decode("latin-1")
    quoted = _quoted(text)
    if len(quoted) == len(text) + 2 and text.isprintable():  # there is nothing to escape
        path = f'{quoted[: len(target) + 1]}"'
    else:
        quoted, path = _quoted(printable(text.encode("latin-1"))), _quoted(printable(target))
    who, host = ("", "null") if client is None else _client_json(client)
    before, after, named, result = _around_target_json(method, version, status)
    message = f'"{who}{before}{quoted[1:-1]}{after}"' if method != "CALL" else _quoted(message_of(access))
    request = f', "request_id": {_quoted(request_id)}' if request_id else ""
    trace = f', "trace_id": {_quoted(trace_id)}' if trace_id else ""
    at_ns = int(at * 1e9)
    return (
        f'{_head_json(int(at))}{_THREE[at_ns // 1_000_000 % 1000]}", "timestamp_ns": {at_ns}, '
        f'"message": {message}{_shared_json(access[10:])}{named}{path}{result}{seconds:.6f}'
        f', "client": {host}{request}{trace}}}'
    )


@lru_cache(8)
def _head_json(second: int) -> str:
    return f'{{"levelname": "INFO", "asctime": "{_second(second)},'


@lru_cache(1024)
def _client_json(client: tuple[str, int]) -> tuple[str, str]:
    """Return a client as part of a JSON string, and its host as a JSON string."""
    return _quoted(f"{client[0]}:{client[1]}")[1:-1], _quoted(client[0])


@lru_cache(1024)
def _around_target_json(method: str, version: str, status: int) -> tuple[str, str, str, str]:
    """Return the parts of a JSON line around the target in its message, and before and after the path."""
    before, after = around_target(method, version, status)
    return (
        _quoted(before)[1:-1],
        _quoted(after)[1:-1],
        f', "method": {_quoted(method)}, "path": ',
        f', "status": {status}, "duration_s": ',
    )


@lru_cache(1024)
def _shared_json(names: tuple[str, str, str, str, str]) -> str:
    """Return the part that all requests of a route or a replica share."""
    tags = Access(0.0, "", b"", b"", 0, 0.0, None, "", "", "", *names).tags
    return f", {json.dumps({'logger': ACCESS, **_of_tags(tags)})[1:-1]}"


def traceback_of(record: logging.LogRecord) -> str:
    """Return the traceback of a record's exception, which is formatted only once."""
    if record.exc_info and not record.exc_text:
        record.exc_text = encodable(logging.Formatter().formatException(record.exc_info))
    return record.exc_text or ""


def as_record(access: Access) -> logging.LogRecord:
    """Return a line of the access log as a record, for handlers."""
    record = logging.makeLogRecord(
        {
            "name": "daskserve.access",
            "levelno": logging.INFO,
            "levelname": "INFO",
            "msg": access.message,
            "created": access.time,
            **access.plain()["access"],
        }
    )
    access.tags.mark(record)
    return record


def line_of(plain: Plain) -> str:
    """Return the plain values of an entry as text for a person."""
    place = place_of(plain["application"], plain["deployment"], plain["replica"]) or plain["component"]
    request = f" {plain['request_id']}" if plain["request_id"] else ""
    text = f"{clock(plain['time'])} {plain['level']} {place}{request} -- {plain['message']}"
    return without_control(f"{text}\n{plain['exception']}" if plain["exception"] else text)


def _of_tags(tags: Tags) -> dict[str, str]:
    found = {name: value for name, value in tags.plain().items() if value and name != "component"}
    return {**found, "component_name": tags.component}


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:
        return message_text(record.msg, record.args)
