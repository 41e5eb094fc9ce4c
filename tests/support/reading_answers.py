"""A strict client's reading of the bytes that a server has sent."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

STATUS_LINE = re.compile(rb"HTTP/1\.1 ([0-9]{3}) [\t \x21-\x7e]*")
FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t \x21-\x7e\x80-\xff]*)")


@dataclass
class Answer:
    """One response; ``is_cut`` if the connection ended within it."""

    status: int
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    is_cut: bool = False


def read_answers(data: bytes, methods: list[bytes]) -> list[Answer]:
    """Return the final responses to requests of these methods, in order.

    Raises
    ------
    AssertionError
        A server must not send these bytes.
    """
    answers: list[Answer] = []
    position = 0
    while position < len(data):
        method = methods[len(answers)] if len(answers) < len(methods) else b""
        answer, position = _read_answer(data, position, method)
        if answer.status >= 200:
            answers.append(answer)
        else:
            assert answer.status == 100, answer
    return answers


def _read_answer(data: bytes, start: int, method: bytes) -> tuple[Answer, int]:
    end = data.find(b"\r\n\r\n", start)
    if end < 0:
        return Answer(200, is_cut=True), len(data)
    status_line, *lines = data[start:end].split(b"\r\n")
    matched = STATUS_LINE.fullmatch(status_line)
    assert matched is not None, f"this is no status line: {data[start : start + 100]!r}"
    answer = Answer(int(matched[1]))
    for line in lines:
        matched = FIELD.fullmatch(line)
        assert matched is not None, f"this is no header: {line!r}"
        assert matched[1] not in answer.headers, f"{matched[1]!r} comes twice"
        answer.headers[matched[1].lower()] = matched[2]
    position = end + 4
    # A server that could not parse the request does not know that it was a HEAD.
    is_unread = answer.status >= 400 and answer.headers.get(b"connection") == b"close"
    if answer.status < 200 or answer.status in (204, 304) or (method == b"HEAD" and not is_unread):
        return answer, position
    if method == b"HEAD" and position == len(data):
        return answer, position
    if answer.headers.get(b"transfer-encoding") == b"chunked":
        return answer, _read_chunks(answer, data, position)
    length = answer.headers.get(b"content-length")
    until = len(data) if length is None else position + int(length)
    answer.body = data[position:until]
    answer.is_cut = until > len(data)
    return answer, min(until, len(data))


def _read_chunks(answer: Answer, data: bytes, start: int) -> int:
    position = start
    while True:
        end = data.find(b"\r\n", position)
        if end < 0:
            answer.is_cut = True
            return len(data)
        line = data[position:end]
        assert re.fullmatch(rb"[0-9a-fA-F]+", line), f"this is no chunk: {data[position : position + 100]!r}"
        size = int(line, 16)
        answer.body += data[end + 2 : end + 2 + size]
        position = end + 2 + size + 2
        if position > len(data):
            answer.is_cut = True
            return len(data)
        assert data[position - 2 : position] == b"\r\n", data[end:position]
        if not size:
            return position
