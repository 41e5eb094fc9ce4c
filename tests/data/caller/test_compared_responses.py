"""User code compares the answers of copies, and may hang or raise."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from tables import case

from daskserve.data.caller.routing.shadow import (
    KEPT_DIFFERENCES,
    MAX_COMPARED_BYTES,
    MAX_PENDING,
    HTTPShadowResponse,
    ResponseComparer,
    ShadowResponse,
)
from daskserve.payload.pickling import dump
from daskserve.testing import wait_until

released = threading.Event()


def hangs(old: object, new: object) -> bool:
    return released.wait(30)


class Unshown:
    """A value whose ``repr`` raises an error."""

    def __repr__(self) -> str:
        raise ValueError("no text")


async def test_a_comparison_that_hangs_is_reported_while_it_hangs() -> None:
    released.clear()
    comparer = ResponseComparer(f"{__name__}:hangs", slow_s=0.01)
    copy = asyncio.create_task(asyncio.sleep(0))
    comparer.begin()
    comparing = asyncio.create_task(comparer.compare("call", ShadowResponse(), ShadowResponse(), copy))
    try:
        await wait_until(lambda: comparer.trouble)
        assert (comparer.compared, comparer.failed) == (0, 1)
        assert comparer.trouble == f"{__name__}:hangs has not returned for 0.01 s"
    finally:
        released.set()
    await comparing
    assert (comparer.compared, comparer.failed) == (0, 1)


async def test_a_difference_that_cannot_be_shown_counts() -> None:
    comparer, old = ResponseComparer(None), ShadowResponse()
    old.note({"type": "call.answer", "payload": dump(Unshown())})
    comparer.begin()
    await comparer.compare("call", old, ShadowResponse(), asyncio.create_task(asyncio.sleep(0)))
    assert (comparer.compared, comparer.different, comparer.failed) == (1, 1, 0)
    assert list(comparer.samples) == ["call: <Unshown> != []"]


def answer(*messages: dict[str, Any], error: Exception | None = None) -> ShadowResponse:
    made = ShadowResponse()
    for each in messages:
        made.note(each)
    made.error = error
    return made


def http(status: int, *bodies: bytes, **headers: str) -> ShadowResponse:
    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    start = {"type": "http.response.start", "status": status, "headers": named}
    return answer(start, *({"type": "http.response.body", "body": each} for each in bodies))


def call(*values: Any) -> ShadowResponse:
    return answer(*({"type": "call.answer", "payload": dump(each)} for each in values))


async def compared(comparer: ResponseComparer, old: ShadowResponse, new: ShadowResponse) -> None:
    comparer.begin()
    await comparer.compare("q", old, new, asyncio.create_task(asyncio.sleep(0)))


async def test_answers_are_compared_by_their_values_and_errors_by_their_kind() -> None:
    for old, new, difference in (
        (call(1), call(1), ""),
        (call(1), call(2), "q: 1 != 2"),
        (call(1, 2), call(1, 2), ""),
        (call(1, 2), call(1), "q: [1, 2] != 1"),
        (call("a" * 1000), call("b"), None),
        (http(200, b"a", b"b"), http(200, b"ab"), ""),
        (http(200, b"a", x="1"), http(200, b"a", x="2"), ""),
        (http(200, b"a"), http(201, b"a"), "q: 200 b'a' != 201 b'a'"),
        (http(200, b"a"), http(200, b"b"), "q: 200 b'a' != 200 b'b'"),
        (answer(error=KeyError("a")), answer(error=KeyError("b")), ""),
        (answer(error=KeyError("a")), answer(error=ValueError("a")), "q: KeyError: 'a' != ValueError: a"),
        (call(1), answer(error=KeyError("a")), "q: 1 != KeyError: 'a'"),
    ):
        with case(difference):
            comparer = ResponseComparer(None)
            await compared(comparer, old, new)
            assert (comparer.compared, comparer.failed, comparer.trouble) == (1, 0, "")
            assert comparer.different == (difference != "")
            if difference is not None:
                assert list(comparer.samples) == [each for each in [difference] if each]


def by_header(old: HTTPShadowResponse, new: HTTPShadowResponse) -> bool:
    return dict(old.headers) == dict(new.headers) and old.status <= new.status


def refuses(old: object, new: object) -> bool:
    raise SystemExit("not comparable")


async def test_a_function_of_the_user_compares_and_may_fail() -> None:
    comparer = ResponseComparer(f"{__name__}:by_header")
    await compared(comparer, http(200, b"a", x="1"), http(500, b"b", x="1"))
    await compared(comparer, http(200, b"a", x="1"), http(200, b"a", x="2"))
    ordered = ResponseComparer("operator:lt")
    await compared(ordered, call(1), call(2))
    assert ordered.plain() == [1, 0, [], 0, ""]
    assert comparer.plain() == [2, 1, ["q: 200 b'a' != 200 b'a'"], 0, ""]
    failing = ResponseComparer(f"{__name__}:refuses")
    await compared(failing, call(1), call(1))
    assert failing.plain() == [0, 0, [], 1, f"{__name__}:refuses raised SystemExit: not comparable"]


async def test_answers_that_are_too_large_or_never_came_are_not_compared() -> None:
    comparer = ResponseComparer(None)
    large = http(200, b"x" * (MAX_COMPARED_BYTES + 1))
    assert not large.is_whole
    for old, new in ((large, call(1)), (call(1), large)):
        await compared(comparer, old, new)
    assert http(200, b"x" * (MAX_COMPARED_BYTES // 2)).is_whole
    copy = asyncio.create_task(asyncio.sleep(30))
    copy.cancel()
    comparer.begin()
    await comparer.compare("q", call(1), call(2), copy)
    assert comparer.plain() == [0, 0, [], 0, ""]
    for _ in range(MAX_PENDING):
        assert comparer.has_room
        comparer.begin()
    assert not comparer.has_room
    comparer.skip()
    assert comparer.has_room
    for number in range(KEPT_DIFFERENCES + 1):
        await compared(comparer, call(number), call(-1))
    assert len(comparer.samples) == KEPT_DIFFERENCES
    assert comparer.samples[0] == "q: 1 != -1"
