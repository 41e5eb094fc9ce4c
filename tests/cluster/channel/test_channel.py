"""Channels over an in-memory comm: streams, flow control and all kinds of ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from by_task import by_task

from daskserve.cluster.channel.channel import Channel
from daskserve.cluster.channel.connect.comm_transport import CommTransport
from daskserve.cluster.channel.connect.dialling import READY
from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.channel.streams import WINDOW_BYTES
from daskserve.cluster.channel.wire.frames import OPEN
from daskserve.common.types import (
    ActorAddress,
    Envelope,
    EnvelopeKind,
    Load,
    Message,
    Payload,
    QueueTimeout,
    Receive,
    Send,
)
from daskserve.errors import ActorLostError, BadRequestError, RequestTimeoutError
from daskserve.payload.pickling import MESSAGE_BYTES

pytestmark = pytest.mark.virtual_time


ADDRESS = ActorAddress("local/replica/b#AAAAAA", "there", 1)
HTTP = Envelope(EnvelopeKind.HTTP, {"type": "http"})
Handler = Callable[[Receive, Send], Awaitable[None]]


class QueueComm:
    """One end of an in-memory connection, with the part of Dask's comm interface that channels use."""

    def __init__(self, incoming: asyncio.Queue[Any], outgoing: asyncio.Queue[Any]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self.peer_address = "there"
        self.written: list[Any] = []
        self._is_closed = False

    def closed(self) -> bool:
        return self._is_closed

    async def write(self, frames: list[Any]) -> None:
        arriving = [_plain(frame) for frame in frames]
        self.written += frames
        self._outgoing.put_nowait(arriving)

    async def read(self) -> Any:
        frames = await self._incoming.get()
        if frames is None:
            raise OSError("closed")
        return frames

    def abort(self) -> None:
        self._is_closed = True
        self._outgoing.put_nowait(None)
        self._incoming.put_nowait(None)


def _plain(value: Any) -> Any:
    """Return a value as the other end receives it: copied, and without Dask's serialization wrappers."""
    if isinstance(value, set):
        raise TypeError("can not serialize 'set' object")
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(each) for each in value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return getattr(value, "data", value) if type(value).__name__ == "Serialize" else value


class Pair:
    """Two connected channels; ``there`` answers with a handler."""

    def __init__(self, handler: Handler) -> None:
        forth: asyncio.Queue[Any] = asyncio.Queue()
        back: asyncio.Queue[Any] = asyncio.Queue()

        @by_task
        async def dispatch(
            name: str, incarnation: int, envelope: Envelope, receive: Receive, send: Send
        ) -> Load:
            assert (name, incarnation) == (ADDRESS.name, ADDRESS.incarnation)
            await handler(receive, send)
            return Load(3, 4)

        self.comms = QueueComm(back, forth), QueueComm(forth, back)
        self.here = Channel(CommTransport(self.comms[0]), dispatch, first_stream=0)
        self.there = Channel(CommTransport(self.comms[1]), dispatch, first_stream=1)

    def ask(self, client: Client, envelope: Envelope = HTTP) -> Coroutine[Any, Any, Load]:
        return self.here.request(ADDRESS, envelope).respond(client.receive, client.send)

    def begin(self, client: Client, envelope: Envelope = HTTP) -> asyncio.Task[Load]:
        return asyncio.create_task(self.ask(client, envelope))

    def remembered(self) -> list[Any]:
        """Return the streams that either side still keeps."""
        return [
            each
            for side in (self.here, self.there)
            for known in (side._opened, side._accepted)
            for each in known
        ]


@asynccontextmanager
async def connected(handler: Handler) -> AsyncIterator[Pair]:
    """Yield a pair of channels; check at the end that neither keeps a stream."""
    pair = Pair(handler)
    serving = [asyncio.create_task(side.serve()) for side in (pair.here, pair.there)]
    yield pair
    await asyncio.sleep(1)
    assert pair.remembered() == []
    pair.here.close()
    pair.there.close()
    await asyncio.gather(*serving)


def body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


class Client:
    """Sends messages as a request's body, and keeps the answers."""

    def __init__(self, *chunks: bytes) -> None:
        self.left = list(chunks)
        self.given = 0
        self.answers: list[Message] = []
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def receive(self) -> Message:
        if not self.left:
            return await nothing()
        self.given += 1
        chunk = self.left.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(self.left)}

    async def send(self, message: Message) -> None:
        await self.may_read.wait()
        self.answers.append(message)


async def test_a_request_and_its_answer_are_carried() -> None:
    async def echo(receive: Receive, send: Send) -> None:
        message = await receive()
        await send(body(message["body"].upper(), more=False))

    client = Client(b"hello")
    async with connected(echo) as pair:
        load = await pair.ask(client)
    assert load == Load(3, 4)
    assert client.answers == [body(b"HELLO", more=False)]


async def test_a_small_exchange_takes_two_frames_out_and_one_back() -> None:
    async def echo(receive: Receive, send: Send) -> None:
        await send(body((await receive())["body"], more=False))

    client = Client(b"x" * 1000)
    async with connected(echo) as pair:
        await pair.ask(client)
        assert [len(comm.written) for comm in pair.comms] == [2, 1]


async def test_an_answer_that_has_ended_is_granted_no_credit() -> None:
    async def large(receive: Receive, send: Send) -> None:
        await send(body(bytes(WINDOW_BYTES * 3 // 4), more=False))

    client = Client()
    async with connected(large) as pair:
        await pair.ask(client)
        await asyncio.sleep(1)
        assert [frame[0] for frame in pair.comms[0].written] == [OPEN]


async def test_messages_of_one_loop_iteration_share_a_frame() -> None:
    async def chunks(receive: Receive, send: Send) -> None:
        for _ in range(3):
            await send(body(b"a", more=True))
            await send(body(b"b", more=True))
            await asyncio.sleep(1)
        await send(body(b"c", more=False))

    client = Client()
    async with connected(chunks) as pair:
        load = await pair.ask(client)
        assert load == Load(3, 4)
        assert [len(comm.written) for comm in pair.comms][1] == 4
    assert b"".join(answer["body"] for answer in client.answers) == b"abababc"


async def test_a_complete_answer_arrives_while_its_handler_runs_on() -> None:
    async def lingering(receive: Receive, send: Send) -> None:
        await send(body(b"all there is", more=False))
        await asyncio.sleep(60)

    client = Client()
    async with connected(lingering) as pair:
        request = pair.begin(client)
        await asyncio.sleep(1)
        assert client.answers == [body(b"all there is", more=False)]
        assert await request == Load(3, 4)


async def test_a_body_is_one_message_ahead_of_a_handler_that_does_not_read() -> None:
    async def refuse(receive: Receive, send: Send) -> None:
        await asyncio.sleep(5)
        raise BadRequestError("no")

    client = Client(*[b"x" * 1000] * 50)
    async with connected(refuse) as pair:
        with pytest.raises(BadRequestError):
            await pair.ask(client)
    assert client.given == 1


async def test_an_error_while_the_body_is_received_ends_the_request() -> None:
    """A middleware of the user's may raise, for example because a body is too large."""

    async def read_all(receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass

    async def receive() -> Message:
        raise ValueError("too large")

    client = Client()
    client.receive = receive  # type: ignore[method-assign]
    async with connected(read_all) as pair:
        with pytest.raises(ValueError, match="too large"):
            await asyncio.wait_for(pair.ask(client), 60)


async def test_an_upload_is_at_most_a_window_ahead_of_a_slow_reader() -> None:
    read = 0
    chunk = b"x" * 65536

    async def slow(receive: Receive, send: Send) -> None:
        nonlocal read
        more = True
        while more:
            more = (await receive())["more_body"]
            read += 1
            ahead = (client.given - read) * (len(chunk) + MESSAGE_BYTES)
            assert ahead <= WINDOW_BYTES * 1.6
            await asyncio.sleep(1)

    client = Client()
    client.left = [chunk] * 200
    async with connected(slow) as pair:
        await pair.ask(client)
    assert read == client.given == 200


@pytest.mark.parametrize("size", [1, 1000, 65536, 3 * WINDOW_BYTES])
async def test_a_download_is_at_most_a_window_ahead_of_a_slow_reader(size: int) -> None:
    count = max(20, 4 * WINDOW_BYTES // (size + MESSAGE_BYTES))
    sent = 0

    async def stream(receive: Receive, send: Send) -> None:
        nonlocal sent
        for number in range(count):
            await send(body(bytes([number % 256]) * size, more=number < count - 1))
            sent += 1

    client = Client(b"")
    client.may_read.clear()
    async with connected(stream) as pair:
        request = pair.begin(client)
        await asyncio.sleep(60)
        assert sent < count
        assert (sent - 1) * (size + MESSAGE_BYTES) < WINDOW_BYTES
        client.may_read.set()
        await request
    assert [each["body"][:1] for each in client.answers] == [bytes([n % 256]) for n in range(count)]


async def test_python_values_count_toward_the_window() -> None:
    sent = 0
    value = Payload(b"pickle", (bytearray(300_000),))

    async def stream(receive: Receive, send: Send) -> None:
        nonlocal sent
        for _ in range(20):
            await send({"type": "call.item", "payload": value})
            sent += 1

    client = Client()
    client.may_read.clear()
    envelope = Envelope(EnvelopeKind.CALL, {}, value)
    async with connected(stream) as pair:
        request = pair.begin(client, envelope)
        await asyncio.sleep(60)
        assert sent <= 4
        client.may_read.set()
        await request
    assert len(client.answers) == 20
    assert bytes(client.answers[0]["payload"].buffers[0]) == bytes(300_000)


async def test_a_websocket_is_carried_until_its_client_disconnects() -> None:
    count = 4 * WINDOW_BYTES // 100_000
    seen: list[Message] = []

    async def echo(receive: Receive, send: Send) -> None:
        while not seen or seen[-1]["type"] != "websocket.disconnect":
            seen.append(await receive())
            await asyncio.sleep(0.01)

    given = 0

    async def receive() -> Message:
        nonlocal given
        given += 1
        if given == 1:
            return {"type": "websocket.connect"}
        if given == count:
            return {"type": "websocket.disconnect", "code": 1000}
        assert given - len(seen) <= 2 * WINDOW_BYTES // 100_000
        return {"type": "websocket.receive", "bytes": bytes(100_000), "text": None}

    async with connected(echo) as pair:
        await pair.here.request(ADDRESS, HTTP).respond(receive, Client().send)
    assert len(seen) == given == count


async def test_cancelling_while_the_window_is_full_ends_the_handler() -> None:
    ended: list[type[BaseException]] = []

    async def stream(receive: Receive, send: Send) -> None:
        try:
            while True:
                await send(body(b"x" * 65536, more=True))
        except BaseException as error:
            ended.append(type(error))
            raise

    client = Client(b"")
    client.may_read.clear()
    async with connected(stream) as pair:
        request = pair.begin(client)
        await asyncio.sleep(1)
        request.cancel()
        await asyncio.wait([request])
    assert ended == [asyncio.CancelledError]


async def test_a_request_without_a_body_is_read_as_empty_and_sends_no_frame() -> None:
    read: list[Message] = []

    async def handler(receive: Receive, send: Send) -> None:
        read.append(await receive())
        await send(body(b"done", more=False))
        await receive()

    async with connected(handler) as pair:
        envelope = Envelope(EnvelopeKind.HTTP, {"type": "http"}, has_body=False)
        answers: list[Message] = []

        async def keep(message: Message) -> None:
            answers.append(message)

        request = asyncio.create_task(pair.here.request(ADDRESS, envelope).respond(nothing, keep))
        await asyncio.sleep(1)
        assert read == [{"type": "http.request", "body": b"", "more_body": False}]
        assert answers == [body(b"done", more=False)]
        assert len(pair.comms[0].written) == 1
        request.cancel()
        await asyncio.wait([request])


@pytest.mark.parametrize("is_lost", [False, True])
async def test_code_that_outlives_its_request_receives_a_disconnect(is_lost: bool) -> None:
    """Whether the request was cancelled or its connection was lost."""
    received = []
    readers = []

    async def handler(receive: Receive, send: Send) -> None:
        async def read() -> None:
            while not received or received[-1]["type"] != "http.disconnect":
                received.append(await receive())

        readers.append(asyncio.create_task(read()))
        await asyncio.Event().wait()

    async with connected(handler) as pair:
        envelope = Envelope(EnvelopeKind.HTTP, {"type": "http"}, has_body=False)

        async def ignore(message: Message) -> None: ...

        request = asyncio.create_task(pair.here.request(ADDRESS, envelope).respond(nothing, ignore))
        await asyncio.sleep(1)
        assert received == [{"type": "http.request", "body": b"", "more_body": False}]
        if is_lost:
            pair.here.close()
        else:
            request.cancel()
        await asyncio.wait([request, *readers])
        assert received[1:] == [{"type": "http.disconnect"}]


async def test_a_handler_cancelled_before_its_first_step_leaves_nothing() -> None:
    async def never(receive: Receive, send: Send) -> None:
        raise AssertionError("it was cancelled")

    async with connected(never) as pair:
        await asyncio.sleep(1)
        open_frame = (0, 0, ADDRESS.name, ADDRESS.incarnation, "call", {}, None, True, None, None)
        pair.there._receive_frame(open_frame)
        pair.there._receive_frame((4, 0))


async def test_a_lost_connection_ends_both_sides_of_a_stream() -> None:
    ended = 0

    async def stream(receive: Receive, send: Send) -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            ended += 1

    client = Client(b"")
    async with connected(stream) as pair:
        request = pair.begin(client)
        await asyncio.sleep(1)
        pair.comms[0].abort()
        with pytest.raises(ActorLostError) as caught:
            await request
        assert caught.value.begun
        await asyncio.sleep(1)
        assert ended == 1
        with pytest.raises(ActorLostError) as caught:
            await pair.ask(client)
        assert not caught.value.begun


async def test_an_unsent_request_on_a_lost_connection_had_not_begun() -> None:
    async def stream(receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async with connected(stream) as pair:
        sent = pair.begin(Client())
        await asyncio.sleep(1)
        pair.comms[0].abort()  # the channel has not noticed yet
        unsent = pair.begin(Client())
        for request, begun in ((sent, True), (unsent, False)):
            with pytest.raises(ActorLostError) as caught:
                await request
            assert caught.value.begun is begun
            assert caught.value.is_disconnected


async def test_a_message_that_cannot_be_packed_fails_only_its_stream() -> None:
    async def answer(receive: Receive, send: Send) -> None:
        message = await receive()
        if message["body"] == b"bad":
            await send({"type": "call.result", "value": {1}})
            await asyncio.Event().wait()
        await send(body(b"fine", more=False))

    good, bad = Client(b"good"), Client(b"bad")
    async with connected(answer) as pair:
        outcomes = await asyncio.gather(
            *map(pair.ask, (bad, good)),
            return_exceptions=True,
        )
    assert isinstance(outcomes[0], TypeError)
    assert outcomes[1] == Load(3, 4)
    assert good.answers == [body(b"fine", more=False)]


async def test_an_invalid_frame_ends_the_connection_and_its_streams(caplog: pytest.LogCaptureFixture) -> None:
    for garbage in [
        7,
        "text",
        [7],
        [()],
        [(1,)],
        [(0, 2, "name")],
        [(0, 2, "n", 1, "no kind", {}, None)],
        [[1, 0]],
    ]:

        async def stream(receive: Receive, send: Send) -> None:
            await asyncio.Event().wait()

        client = Client(b"")
        async with connected(stream) as pair:
            request = pair.begin(client)
            await asyncio.sleep(1)
            # Bypass the serializer, like the bytes of another program.
            pair.comms[1]._outgoing.put_nowait(garbage)
            with pytest.raises(ActorLostError) as caught:
                await request
            assert caught.value.begun, garbage
            assert pair.here.is_closed, garbage
        assert "invalid frame" in caplog.text, garbage


async def test_frames_of_unknown_kinds_and_streams_are_ignored() -> None:
    async def echo(receive: Receive, send: Send) -> None:
        await send(body((await receive())["body"], more=False))

    client = Client(b"fine")
    async with connected(echo) as pair:
        unknown = [(99, 0), (1, 77, {"type": "x"}), (2, 77, 0, 0), (3, 77, b""), (4, 77), (5, 77, 10)]
        pair.comms[0]._outgoing.put_nowait(unknown)
        pair.comms[1]._outgoing.put_nowait(unknown)
        assert await pair.ask(client) == Load(3, 4)


# ---- deadlines


async def test_the_remaining_time_travels_and_the_other_side_enforces_it() -> None:
    """The caller never cancels, like a stopped process."""
    cancelled_at = []

    async def handler(receive: Receive, send: Send) -> None:
        try:
            await nothing()
        except asyncio.CancelledError:
            cancelled_at.append(asyncio.get_running_loop().time())
            raise

    await asyncio.sleep(100)
    async with connected(handler) as pair:
        envelope = Envelope(EnvelopeKind.CALL, {}, deadline=105.0)
        with pytest.raises(RequestTimeoutError, match="The deadline of a request"):
            await pair.here.request(ADDRESS, envelope).respond(nothing, nothing)
        assert pair.comms[0].written[0][-2] == 5.0
        assert cancelled_at == [105.0]


async def test_the_deadline_on_the_handlers_own_clock_and_the_patience_of_a_request_travel() -> None:
    pair = Pair(lambda receive, send: nothing())
    found = []

    @by_task
    async def dispatch(_: str, __: int, envelope: Envelope, receive: Receive, send: Send) -> Load:
        found.append((envelope.deadline, envelope.queue_timeout))
        return Load()

    pair.there._dispatch = dispatch
    serving = [asyncio.create_task(side.serve()) for side in (pair.here, pair.there)]
    patience = QueueTimeout(0.5, 2.0)
    for deadline, queue_timeout in ((None, None), (7.0, None), (None, patience)):
        envelope = Envelope(EnvelopeKind.CALL, {}, deadline=deadline, queue_timeout=queue_timeout)
        await pair.here.request(ADDRESS, envelope).respond(nothing, nothing)
    frame = pair.comms[0].written[0]
    assert frame[-2:] == (None, None)
    await asyncio.sleep(1)
    pair.there._receive_frame((frame[0], 98, *frame[2:-2], 2.5, None))
    await asyncio.sleep(1)
    assert found == [(None, None), (7.0, None), (None, patience), (3.5, None)]
    pair.here.close()
    pair.there.close()
    await asyncio.gather(*serving)


async def test_a_request_that_arrives_after_its_deadline_is_not_begun() -> None:
    async def handler(receive: Receive, send: Send) -> None:
        raise AssertionError("begun")

    async with connected(handler) as pair:
        await asyncio.sleep(6)
        with pytest.raises(RequestTimeoutError):
            await pair.here.request(ADDRESS, Envelope(EnvelopeKind.CALL, {}, deadline=5.0)).respond(
                nothing, nothing
            )


async def test_a_connection_accepted_while_the_pool_closes_is_closed() -> None:
    """Otherwise both sides would keep it until the other process ends."""

    class SlowComm(QueueComm):
        async def write(self, frames: Any) -> None:
            self.written.append(frames)
            await asyncio.sleep(1)

    async def never_called(*_: Any) -> Load:
        raise AssertionError

    async def nowhere(worker: str) -> Any:
        raise AssertionError

    pool = ChannelPool(never_called, nowhere)
    comm = SlowComm(asyncio.Queue(), asyncio.Queue())
    accepting = asyncio.create_task(pool.accept(comm, by_socket=False))
    await asyncio.sleep(0.5)
    await pool.close()
    await asyncio.wait_for(accepting, 1)
    assert comm.written == [READY]
    assert comm.closed()
