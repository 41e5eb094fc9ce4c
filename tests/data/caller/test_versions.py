"""Which version of a backend gets a request during a rollout, and which outcomes count as failures."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest
from tables import each_case

from daskserve.common.types import Envelope, EnvelopeKind, Message, Receive, Send
from daskserve.data.caller.routing.versions import Versions
from daskserve.data.version_counts import is_fault, sent
from daskserve.errors import (
    BackPressureError,
    BadRequestError,
    NotFoundError,
    RequestTimeoutError,
    ServeError,
    UnavailableError,
)
from daskserve.payload.packed_errors import pack_all, received_error

VALUE = {"key": "r/0/0.25", "share": 0.25, "names": ["2", "1"], "sticky": None}


class Stage:
    """Two versions whose answers the test sets."""

    def __init__(self, **changed: Any) -> None:
        self.seen: list[str] = []
        self.status = 200
        self.error: BaseException | None = None
        self.rng = random.Random(1)
        self.now = 0.0
        self.versions = Versions({**VALUE, **changed}, "m", self.to("1"), self.to("2"), lambda: self.now)

    def to(self, version: str) -> Any:
        async def answer(envelope: Envelope, receive: Receive, send: Send) -> None:
            self.seen.append(version)
            self.now += 0.2
            if self.error is not None:
                raise self.error
            await send({"type": "http.response.start", "status": self.status, "headers": []})

        return answer

    async def send(self, *headers: tuple[bytes, bytes], key: str = "", deadline: float | None = None) -> str:
        async def nothing() -> Message:
            return {}

        async def drop(message: Message) -> None:
            pass

        head = {"type": "http", "headers": list(headers)}
        envelope = Envelope(EnvelopeKind.HTTP, head, deadline=deadline)
        version = self.versions.choose(envelope, key, self.rng)
        await self.versions.send(version, envelope, nothing, drop)
        return self.seen[-1]


@pytest.mark.virtual_time
async def test_requests_are_divided_by_chance() -> None:
    stage = Stage()
    for _ in range(400):
        await stage.send()
    assert 70 <= stage.seen.count("2") <= 130


@each_case("sticky, header", [("header:X-Session", b"x-session"), ("cookie:session", b"cookie")])
def test_a_session_keeps_its_version_and_the_new_one_also_at_the_next_step(
    sticky: str, header: bytes
) -> None:
    async def scenario() -> None:
        first, later = Stage(sticky=sticky), Stage(sticky=sticky, share=0.5)
        chosen = {}
        for n in range(200):
            value = b"%d" % n if header != b"cookie" else b"a=b; session=%d" % n
            chosen[n] = await first.send((header, value))
            assert await first.send((header, value)) == chosen[n]
            assert "2" in (await later.send((header, value)), "2" if chosen[n] == "1" else "")
        assert 30 <= list(chosen.values()).count("2") <= 70

    asyncio.run(scenario())


@pytest.mark.virtual_time
async def test_a_request_may_name_its_version_and_is_not_counted() -> None:
    stage = Stage()
    for name, version in ((b"candidate", "2"), (b"stable", "1"), (b"2", "2"), (b"1", "1")):
        assert await stage.send((b"x-serve-version", name)) == version
    assert stage.versions.plain() is None
    with pytest.raises(NotFoundError, match="has no version '3'; there are candidate"):
        await stage.send((b"x-serve-version", b"3"))


@each_case(
    "why, status, error, expected",
    [
        ("answered", 200, None, [1, 0]),
        ("the client's fault", 404, None, [1, 0]),
        ("the version's fault", 503, None, [1, 1]),
        ("user code raised", 200, ValueError(), [1, 1]),
        ("the request is wrong", 200, BadRequestError("no"), [1, 0]),
        ("its queue is full", 200, BackPressureError("no"), [1, 1]),
        ("the client left", 200, ConnectionResetError(), None),
    ],
)
def test_outcomes_are_counted_by_status_and_error(
    why: str, status: int, error: Exception | None, expected: list[int] | None
) -> None:
    async def scenario() -> None:
        stage = Stage(share=1.0)
        stage.status, stage.error = status, error
        await asyncio.gather(stage.send(), return_exceptions=True)
        found = stage.versions.plain()
        assert (None if found is None else found["new"][:2]) == expected
        if found is not None:
            assert (found["key"], sum(found["new"][2])) == ("r/0/0.25", 1)

    asyncio.run(scenario())


@pytest.mark.virtual_time
async def test_a_missed_deadline_is_a_failure_and_a_client_that_leaves_is_not() -> None:
    for deadline, expected in ((0.0, [1, 1]), (1e9, None)):
        stage = Stage(share=1.0)
        stage.error = asyncio.CancelledError()
        with pytest.raises(asyncio.CancelledError):
            await stage.send(deadline=deadline)
        found = stage.versions.plain()
        assert (None if found is None else found["new"][:2]) == expected


# ---- how requests end for the version that served them


class Refused(Exception):
    status_code = 404


class Broken(Exception):
    status_code = 500


@each_case(
    ("error", "expected"),
    [
        (KeyError("a"), True),
        (BadRequestError("a"), False),
        (RequestTimeoutError("a"), False),
        (UnavailableError("a"), True),
        (ServeError("a"), True),
        (Refused(), False),
        (Broken(), True),
    ],
)
def test_an_error_is_a_fault_of_the_version_unless_the_caller_made_a_mistake(
    error: Exception, expected: bool
) -> None:
    assert is_fault(error) == expected
    if type(error) is not Refused:
        assert is_fault(received_error(pack_all(error).data)) == expected, "as it comes from a replica"


async def ended_with(call: Any, kind: EnvelopeKind = EnvelopeKind.CALL, **head: Any) -> list[bool]:
    """Return the counted outcome of a request; check that there is at most one."""
    found: list[bool] = []
    envelope = Envelope(kind, head, deadline=head.pop("deadline", None))

    async def receive() -> Any:
        return {}

    async def send(message: Any) -> None: ...

    with suppress(Exception, asyncio.CancelledError):
        assert await sent(call, envelope, receive, send, found.append) == "value"
    return found


async def test_each_end_of_a_request_is_counted_once() -> None:
    now = asyncio.get_running_loop().time()

    def raising(error: BaseException) -> Any:
        async def call(*_: Any) -> Any:
            raise error

        return call

    def sending(*messages: Any) -> Any:
        async def call(envelope: Any, receive: Any, send: Any) -> str:
            for each in messages:
                await send(each)
            return "value"

        return call

    http = EnvelopeKind.HTTP
    assert await ended_with(sending()) == [False]
    assert await ended_with(sending({"status": 499}, {"body": b""}), http, type="http") == [False]
    assert await ended_with(sending({"status": 500}, {"body": b""}), http, type="http") == [True]
    assert await ended_with(sending({"status": 500}), http, type="websocket") == [False]
    assert await ended_with(raising(KeyError("a"))) == [True]
    assert await ended_with(raising(BadRequestError("a"))) == [False]
    assert await ended_with(raising(ConnectionResetError("the client left"))) == []
    assert await ended_with(raising(asyncio.CancelledError())) == []
    assert await ended_with(raising(asyncio.CancelledError()), deadline=now + 60) == []
    assert await ended_with(raising(asyncio.CancelledError()), deadline=now - 1) == [True]
