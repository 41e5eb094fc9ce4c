"""Single-answer requests without a task, over a pair of sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
from by_task import by_task

from daskserve.cluster.channel.channel import Channel
from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.channel.streams import WINDOW_BYTES, OpenedStream
from daskserve.cluster.channel.wire import frames
from daskserve.cluster.channel.wire.transport import MAX_WORK, SocketTransport
from daskserve.common.types import (
    ActorAddress,
    ActorRequest,
    Envelope,
    EnvelopeKind,
    Load,
    Message,
    OnAnswer,
    Payload,
    QueueTimeout,
    Receive,
    Send,
)
from daskserve.errors import ActorLostError, BadRequestError
from daskserve.loops.thread_calls import CallInbox, ThreadCalls

DEADLINE_S = 10.0
ADDRESS = ActorAddress("local/replica/b#AAAAAA", "there", 1)
Handler = Callable[[Envelope, Send], Awaitable[None]]


def call(argument: bytes = b"", **head: Any) -> Envelope:
    return Envelope(EnvelopeKind.CALL, head, Payload(argument))


class Asker:
    """Keeps the outcome of one request."""

    def __init__(self, channel: Channel, envelope: Envelope) -> None:
        self.ends: list[tuple[Message | None, Load | Exception]] = []
        self._ended = asyncio.Event()
        self.give_up = channel.request(ADDRESS, envelope).start(self._end)

    def _end(self, message: Message | None, outcome: Any) -> None:
        self.ends.append((message, outcome))
        self._ended.set()

    async def end(self) -> tuple[Message | None, Any]:
        await self._ended.wait()
        (only,) = self.ends
        return only


Start = Callable[[Envelope, OnAnswer], Callable[[], None] | None]


class Scripted:
    """A request that the functions of a test answer."""

    def __init__(
        self,
        envelope: Envelope,
        respond: Callable[[Envelope, Receive, Send], Coroutine[Any, Any, Load]],
        start: Start | None,
    ) -> None:
        self.respond = partial(respond, envelope)
        self._envelope = envelope
        self._start = start

    def start(self, on_answer: OnAnswer) -> Callable[[], None] | None:
        return None if self._start is None else self._start(self._envelope, on_answer)


class Ends:
    """Two channels on a pair of sockets; ``there`` answers with a handler."""

    def __init__(self, handler: Handler, start: Start | None) -> None:
        def dispatch(name: str, incarnation: int, envelope: Envelope) -> ActorRequest:
            assert (name, incarnation) == (ADDRESS.name, ADDRESS.incarnation)
            return Scripted(envelope, respond, start)

        async def respond(envelope: Envelope, receive: Receive, send: Send) -> Load:
            self.begun.append(envelope)
            try:
                await handler(envelope, send)
            except asyncio.CancelledError:
                self.cancelled.append(envelope)
                raise
            return Load(3, 4)

        self.begun: list[Envelope] = []
        self.cancelled: list[Envelope] = []
        self.transports = [SocketTransport(each, "there") for each in socket.socketpair()]
        self.here = Channel(self.transports[0], dispatch, first_stream=0)
        self.there = Channel(self.transports[1], dispatch, first_stream=1)
        #: The kinds of the frames that ``there`` received.
        self.kinds: list[int] = []
        receive = self.there._receive

        def note(arrived: Any) -> None:
            self.kinds += [frame[0] for frame in arrived]
            receive(arrived)

        self.there._receive = note  # type: ignore[method-assign]

    def ask(self, argument: bytes = b"", **head: Any) -> Asker:
        return Asker(self.here, call(argument, **head))

    def remembered(self) -> int:
        """Return the number of streams that either side still keeps."""
        sides = (self.here, self.there)
        return sum(len(side._opened) + len(side._accepted) + len(side._taskless) for side in sides)

    async def settled(self) -> None:
        """Wait until all frames have arrived and neither side keeps a stream."""
        await Asker(self.here, call(b"last")).end()
        assert self.remembered() == 0


@asynccontextmanager
async def connected(handler: Handler, start: Start | None = None) -> AsyncIterator[Ends]:
    ends = Ends(handler, start)
    serving = [asyncio.create_task(side.serve()) for side in (ends.here, ends.there)]
    try:
        yield ends
    finally:
        ends.here.close()
        ends.there.close()
        await asyncio.gather(*serving)
    assert ends.remembered() == 0


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what happens on the other side has no event
        await asyncio.sleep(0)


async def echo(envelope: Envelope, send: Send) -> None:
    assert envelope.payload is not None
    if envelope.payload.data == b"hang":
        await asyncio.Event().wait()
    await send({"type": "call.result", "payload": envelope.payload})


async def test_the_answer_carries_the_load() -> None:
    async with connected(echo) as ends:
        askers = [ends.ask(b"%d" % number) for number in range(3 * MAX_WORK)]
        for number, asker in enumerate(askers):
            message, load = await asker.end()
            assert message == {"type": "call.result", "payload": Payload(b"%d" % number, ())}
            assert load == Load(3, 4)
        assert set(ends.kinds) == {frames.OPEN}
        assert ends.begun[0].kind is EnvelopeKind.CALL
        assert ends.begun[0].deadline is ends.begun[0].queue_timeout is None


async def test_a_large_answer_grants_credit_so_that_its_handler_ends() -> None:
    async def answer(envelope: Envelope, send: Send) -> None:
        assert envelope.payload is not None
        data = envelope.payload.data
        as_buffer = Payload(b"x", (bytearray(data),))
        await send({"type": "call.result", "payload": as_buffer if envelope.head else Payload(data)})
        sent.append(1)

    for is_buffer, size in product([False, True], [WINDOW_BYTES // 2, WINDOW_BYTES, 3 * WINDOW_BYTES]):
        case = is_buffer, size
        data, sent = bytes(range(256)) * (size // 256), list[int]()
        async with connected(answer) as ends:
            message, load = await ends.ask(data, **({"is_buffer": True} if is_buffer else {})).end()
            assert message is not None, case
            payload = message["payload"]
            assert bytes(payload.buffers[0] if is_buffer else payload.data) == data, case
            assert (load, sent) == (Load(3, 4), [1]), case
            await until(lambda ends=ends: ends.remembered() == 0)
            # A smaller answer left in one frame with the handler's end.
            assert ends.kinds == [frames.OPEN, *[frames.CREDIT] * (size >= WINDOW_BYTES)], case


async def test_a_large_answer_to_a_cancelled_request_blocks_nothing() -> None:
    async def answer(envelope: Envelope, send: Send) -> None:
        assert envelope.payload is not None
        if envelope.payload.data != b"last":
            await send({"type": "call.result", "payload": Payload(bytes(3 * WINDOW_BYTES))})

    async with connected(answer) as ends:
        asker = ends.ask()
        await until(lambda: ends.begun)
        asker.give_up()
        await ends.settled()
        assert asker.ends == []
        assert len(ends.cancelled) <= 1


async def test_an_end_without_an_answer_is_reported() -> None:
    async def nothing(envelope: Envelope, send: Send) -> None:
        pass

    async with connected(nothing) as ends:
        assert await ends.ask().end() == (None, Load(3, 4))


class NotPicklable(Exception):
    """An error that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("odd")
        self.lock = threading.Lock()


async def test_handler_errors_reach_the_callback() -> None:
    for error, kind, match in [
        (BadRequestError("no"), BadRequestError, "no"),
        (KeyError("k"), KeyError, "k"),
        (NotPicklable(), NotPicklable, "odd"),
    ]:

        async def fail(envelope: Envelope, send: Send, error: Exception = error) -> None:
            raise error

        async with connected(fail) as ends:
            message, outcome = await ends.ask().end()
            assert message is None, error
            assert type(outcome) is kind, error
            assert match in str(outcome), error
            assert (type(outcome.__cause__).__name__ == "RemoteTraceback") is (kind is not BadRequestError), (
                error
            )


async def test_cancelling_cancels_the_handler_once() -> None:
    async with connected(echo) as ends:
        asker = ends.ask(b"hang")
        await until(lambda: ends.begun)
        for _ in range(3):
            asker.give_up()
        await ends.settled()
        assert asker.ends == []
        assert len(ends.cancelled) == 1
        assert ends.kinds.count(frames.CANCEL) == 1


async def test_cancelling_at_once_leaves_nothing_on_either_side() -> None:
    async with connected(echo) as ends:
        asker = ends.ask(b"hang")
        asker.give_up()
        await ends.settled()
        assert asker.ends == []
        assert [each.payload and each.payload.data for each in ends.begun] == [b"last"]


async def test_cancelling_after_the_answer_does_nothing() -> None:
    async with connected(echo) as ends:
        asker = ends.ask(b"1")
        await asker.end()
        asker.give_up()
        await ends.settled()
        assert frames.CANCEL not in ends.kinds
        assert len(asker.ends) == 1


async def test_only_the_first_end_counts() -> None:
    async with connected(echo) as ends:
        asker = ends.ask(b"hang")
        await until(lambda: ends.begun)
        (number,) = ends.here._opened
        ends.there._post((frames.ANSWER, number, ({"type": "call.result", "payload": None},), 1, 1))
        ends.there._post((frames.END, number, 2, 2))
        ends.there._post((frames.CREDIT, number, 2))
        assert (await asker.end())[1] == Load(1, 1)
        for accepted in list(ends.there._accepted):
            ends.there._cancel(accepted, ends.there._accepted[accepted])
        await ends.settled()
        assert len(asker.ends) == 1


async def test_a_lost_connection_fails_begun_requests() -> None:
    for who in ["here", "there"]:
        async with connected(echo) as ends:
            askers = [ends.ask(b"hang") for _ in range(3)]
            given_up = ends.ask(b"hang")
            await until(lambda: len(ends.begun) == 4)
            given_up.give_up()
            getattr(ends, who).close()
            for asker in askers:
                message, error = await asker.end()
                assert message is None, who
                assert isinstance(error, ActorLostError), who
                assert (error.begun, error.is_disconnected) == (True, True), who
                asker.give_up()
            assert given_up.ends == [], who


async def test_an_unsent_single_answer_request_had_not_begun() -> None:
    async with connected(echo) as ends:
        await ends.ask(b"1").end()
        asker = ends.ask(b"2")
        ends.here.close()  # before the end of the loop iteration that would send it
        late = ends.ask(b"3")
        for each in (asker, late):
            _, error = await each.end()
            assert isinstance(error, ActorLostError)
            assert not error.begun
        assert len(ends.begun) == 1


@pytest.mark.parametrize("count", [1, MAX_WORK])
async def test_a_request_that_cannot_be_packed_fails_only_itself(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(echo) as ends:
        await ends.ask(b"0").end()
        # The number of calls decides whether the last one triggers an immediate write.
        askers = [ends.ask(b"%d" % number) for number in range(count - 1)]
        bad = ends.ask(headers={1, 2})
        message, error = await bad.end()
        assert message is None
        assert isinstance(error, TypeError)
        bad.give_up()
        for asker in askers:
            assert (await asker.end())[1] == Load(3, 4)
        await ends.settled()
        assert frames.CANCEL not in ends.kinds
    assert "cannot be sent" in caplog.text


async def test_an_answer_that_cannot_be_packed_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(envelope: Envelope, send: Send) -> None:
        assert envelope.payload is not None
        if envelope.payload.data != b"last":
            await send({"type": "call.result", "odd": {1, 2}})

    async with connected(answer) as ends:
        message, error = await ends.ask().end()
        assert message is None
        assert isinstance(error, TypeError)
        await ends.settled()


async def test_a_pool_starts_requests_over_open_connections_only() -> None:
    @by_task
    async def dispatch(name: str, incarnation: int, envelope: Envelope, receive: Receive, send: Send) -> Load:
        await echo(envelope, send)
        return Load(1)

    far: list[Channel] = []
    tasks: list[asyncio.Task[None]] = []

    async def connect(worker: str) -> SocketTransport:
        near, other = socket.socketpair()
        far.append(Channel(SocketTransport(other, "here"), dispatch, first_stream=1))
        tasks.append(asyncio.create_task(far[-1].serve()))
        return SocketTransport(near, worker)

    pool = ChannelPool(cast(Any, dispatch), connect)
    ended: list[Any] = []
    changed = asyncio.Event()

    def on_answer(message: Message | None, outcome: Any) -> None:
        ended.append(outcome)
        changed.set()

    async def drop(message: Message) -> None:
        pass

    async def nothing() -> Message:
        raise AssertionError

    assert pool.request(ADDRESS, call()).start(on_answer) is None
    await pool.request(ADDRESS, call(b"dials")).respond(nothing, drop)
    assert pool.request(ADDRESS, call(b"1")).start(on_answer) is not None
    await changed.wait()
    assert ended == [Load(1)]
    assert pool.request(replace(ADDRESS, worker="other"), call()).start(on_answer) is None
    # The connection is lost with a request in flight: it fails, and later ones cannot be started.
    changed.clear()
    assert pool.request(ADDRESS, call(b"hang")).start(on_answer) is not None
    await until(lambda: far[0]._accepted)
    far[0].close()
    await changed.wait()
    assert isinstance(ended[1], ActorLostError)
    assert pool.request(ADDRESS, call()).start(on_answer) is None
    await pool.close()
    await asyncio.gather(*tasks)
    assert len(ended) == 2


# ---- on the other side, without a task


class Nowait:
    """Answers calls without a task, under the control of the test."""

    def __init__(self) -> None:
        self.asked: list[tuple[Envelope, OnAnswer]] = []
        self.given_up = 0
        self.error: Exception | None = None
        self.takes = True

    def answer(self, envelope: Envelope, on_answer: OnAnswer) -> Callable[[], None] | None:
        if self.error is not None:
            raise self.error
        if not self.takes:
            return None
        self.asked.append((envelope, on_answer))
        return self.give_up

    def give_up(self) -> None:
        self.given_up += 1


async def test_calls_are_answered_without_a_task_when_possible() -> None:
    nowait = Nowait()
    async with connected(echo, nowait.answer) as ends:
        first, second, third = (ends.ask(b"%d" % number) for number in range(3))
        await until(lambda: len(nowait.asked) == 3)
        message: Message = {"type": "call.result", "payload": Payload(b"well")}
        nowait.asked[0][1](message, Load(5, 6))
        nowait.asked[1][1](None, KeyError("k"))
        assert (await first.end())[1] == Load(5, 6)
        assert first.ends[0][0] == {"type": "call.result", "payload": Payload(b"well", ())}
        assert isinstance((await second.end())[1], KeyError)
        # Cancelled: the answering side is notified once, and a late answer is dropped.
        third.give_up()
        await until(lambda: nowait.given_up == 1)
        assert not ends.there._taskless
        nowait.asked[2][1](message, Load())
        assert not ends.transports[1].unsent
        nowait.takes = False
        assert (await ends.ask(b"by a task").end())[1] == Load(3, 4)
        assert len(ends.begun) == 1
        assert third.ends == []
        assert nowait.given_up == 1


async def test_a_call_that_cannot_be_begun_fails_only_itself() -> None:
    nowait = Nowait()
    async with connected(echo, nowait.answer) as ends:
        other = ends.ask(b"other")
        await until(lambda: nowait.asked)
        nowait.error = RuntimeError("can't start new thread")
        message, error = await ends.ask(b"1").end()
        assert message is None
        assert isinstance(error, RuntimeError)
        nowait.asked[0][1](None, Load(1))
        assert (await other.end())[1] == Load(1)


async def test_a_lost_connection_cancels_all_its_taskless_answers() -> None:
    nowait = Nowait()
    async with connected(echo, nowait.answer) as ends:
        askers = [ends.ask(b"1") for _ in range(3)]
        await until(lambda: len(nowait.asked) == 3)
        ends.here.close()
        for asker in askers:
            assert isinstance((await asker.end())[1], ActorLostError)
        await until(lambda: nowait.given_up == 3)
        nowait.asked[0][1](None, Load())


# ---- requests that continue in a task


class Remainder:
    """A request that continues in a task, under the control of the test."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.happened: list[str] = []

    def start(self, on_answer: OnAnswer) -> None:
        raise AssertionError("it has begun")

    async def respond(self, receive: Receive, send: Send) -> Load:
        self.happened.append("entered")
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await self.may_end.wait()
            await send({"type": "http.response.body", "body": b"end"})
            return Load(7, 8)
        except asyncio.CancelledError:
            self.happened.append("cancelled")
            raise


def get(**changes: Any) -> Envelope:
    return Envelope(EnvelopeKind.HTTP, {"type": "http"}, has_body=False, **changes)


async def nothing() -> Message:
    raise AssertionError("there is no body")


async def test_a_request_that_needs_more_than_one_answer_continues_in_a_task() -> None:
    nowait = Nowait()
    async with connected(echo, nowait.answer) as ends:
        sent: list[Message] = []

        async def keep(message: Message) -> None:
            sent.append(message)

        asking = asyncio.create_task(ends.here.request(ADDRESS, get()).respond(nothing, keep))
        await until(lambda: nowait.asked)
        assert nowait.asked[0][0] == get()
        rest = Remainder()
        nowait.asked[0][1](None, rest)
        assert not ends.there._taskless
        await until(lambda: sent)
        rest.may_end.set()
        assert await asking == Load(7, 8)
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        assert (rest.happened, ends.begun) == (["entered"], [])


@pytest.mark.parametrize("is_entered", [False, True])
@pytest.mark.parametrize("by", ["client", "connection"])
async def test_an_unwanted_task_gives_its_request_up(is_entered: bool, by: str) -> None:
    nowait = Nowait()

    async def keep(message: Message) -> None: ...

    async with connected(echo, nowait.answer) as ends:
        asking = asyncio.create_task(ends.here.request(ADDRESS, get()).respond(nothing, keep))
        await until(lambda: nowait.asked)
        rest = Remainder()
        nowait.asked[0][1](None, rest)
        (number,) = ends.there._accepted
        if is_entered:
            await until(lambda: rest.happened)
        if by == "client":
            ends.there._receive_frame((frames.CANCEL, number))
        else:
            ends.there.close()
            ends.there._finish()
        await until(lambda: nowait.given_up)
        assert rest.happened == ["entered", "cancelled"][: 2 * is_entered]
        assert ends.remembered() <= 1
        asking.cancel()
        await asyncio.wait([asking])
        assert nowait.given_up == 1


async def test_requests_that_may_wait_are_not_answered_without_a_task() -> None:
    for envelope in [
        replace(get(), has_body=True),
        replace(get(), deadline=1e9),
        replace(get(), queue_timeout=QueueTimeout(1.0)),
        replace(get(), kind=EnvelopeKind.CONTROL, head={"verb": "look", "message": {}}),
    ]:
        nowait = Nowait()

        async def answer(envelope: Envelope, send: Send) -> None: ...

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def keep(message: Message) -> None: ...

        async with connected(answer, nowait.answer) as ends:
            assert await ends.here.request(ADDRESS, envelope).respond(receive, keep) == Load(3, 4), envelope
            assert nowait.asked == [], envelope


async def test_posts_of_other_threads_are_sent_before_received_frames_are_handled() -> None:
    did: list[Any] = []

    class Outlet:
        def post(self, frame: Any, work: int = 0) -> None:
            did.append(frame)

        def flush(self) -> None:
            did.append("left")

    def answer(envelope: Envelope, on_answer: OnAnswer) -> Callable[[], None]:
        did.append("begun")
        return lambda: None

    def dispatch(name: str, incarnation: int, envelope: Envelope) -> ActorRequest:
        return Scripted(envelope, cast(Any, print), answer)

    inbox = CallInbox(asyncio.get_running_loop())
    outlet = Outlet()
    channel = Channel(cast(Any, outlet), dispatch, first_stream=1, inbox=inbox)
    thread_calls = ThreadCalls(asyncio.get_running_loop(), inbox)
    poster = threading.Thread(target=thread_calls.post, args=(outlet.post, "ready"))
    poster.start()
    poster.join()  # the loop has not run since
    channel._receive([OpenedStream(0, {}, cast(Any, outlet), ADDRESS, call())._frame()])
    assert did == ["ready", "left", "begun"]
