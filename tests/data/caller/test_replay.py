"""Retries of a request whose replica was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tables import each_case

from daskserve.common.types import Envelope, EnvelopeKind, Message
from daskserve.data.caller.routing.replay import KEPT_BYTES, MAX_REPEATS, Replay


def body(data: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


def replay_over(messages: Sequence[Message], *, is_idempotent: bool = True) -> tuple[Replay, Envelope]:
    given = iter(messages)

    async def receive() -> Message:
        return next(given)

    envelope = Envelope(EnvelopeKind.HTTP, {"method": "GET" if is_idempotent else "POST"})
    return Replay(envelope, receive), envelope


async def test_the_next_replica_gets_the_replayed_messages_and_then_the_rest() -> None:
    replay, _ = replay_over([body(b"a", True), body(b"b", True), body(b"c")])
    assert [await replay.receive(), await replay.receive()] == [body(b"a", True), body(b"b", True)]
    assert replay.rewind(begun=True)
    assert [(await replay.receive())["body"] for _ in range(3)] == [b"a", b"b", b"c"]
    assert replay.rewind(begun=True)
    assert [(await replay.receive())["body"] for _ in range(3)] == [b"a", b"b", b"c"]


@pytest.mark.parametrize(("size", "may_repeat"), [(KEPT_BYTES, True), (KEPT_BYTES + 1, False)])
async def test_a_body_is_kept_up_to_a_size_limit(size: int, may_repeat: bool) -> None:
    replay, _ = replay_over([body(b"x" * size)])
    await replay.receive()
    assert replay.rewind(begun=True) is may_repeat


@pytest.mark.parametrize("is_idempotent", [True, False])
async def test_a_request_that_had_not_begun_is_retried_whatever_its_method(is_idempotent: bool) -> None:
    replay, _ = replay_over([body(b"read ahead", True), body(b"rest")], is_idempotent=is_idempotent)
    await replay.receive()
    for _ in range(MAX_REPEATS + 5):
        assert replay.rewind(begun=False)
        assert (await replay.receive())["body"] == b"read ahead"
    assert (await replay.receive())["body"] == b"rest"
    assert replay.rewind(begun=True) is is_idempotent


def test_a_request_fails_after_it_has_lost_too_many_replicas() -> None:
    replay, _ = replay_over([])
    assert [replay.rewind(begun=True) for _ in range(MAX_REPEATS + 1)] == [True] * MAX_REPEATS + [False]


@each_case(("method", "is_repeatable"), [("GET", True), ("PUT", True), ("POST", False), ("PATCH", False)])
def test_only_idempotent_http_requests_are_retried(method: str, is_repeatable: bool) -> None:
    async def nothing(*_: Any) -> Any:
        return None

    replay = Replay(Envelope(EnvelopeKind.HTTP, {"method": method}), nothing)
    assert replay.rewind(begun=True) is is_repeatable


async def test_a_whole_body_of_any_size_is_kept_for_a_replica_that_has_not_begun() -> None:
    whole = body(b"x" * 10 * KEPT_BYTES)
    replay, _ = replay_over([whole])
    assert await replay.receive() == whole
    assert not replay.rewind(begun=True)
    assert replay.rewind(begun=False)
    assert (await replay.receive())["body"] is whole["body"]
    parts, _ = replay_over([body(b"x" * 10 * KEPT_BYTES, True), body(b"")])
    await parts.receive()
    assert not parts.rewind(begun=False)


async def test_parts_that_only_a_router_has_read_do_not_count_as_seen_by_a_replica() -> None:
    replay, _ = replay_over([body(b"x" * 2 * KEPT_BYTES, True), body(b"y")])
    for _ in range(2):
        assert await replay.peek() == b"x" * 2 * KEPT_BYTES
        assert replay.rewind(begun=False)
    assert [(await replay.receive())["body"][:1] for _ in range(2)] == [b"x", b"y"]
    assert not replay.rewind(begun=True)
