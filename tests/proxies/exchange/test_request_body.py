from __future__ import annotations

import asyncio

from http_harness import poll_for, run

from daskserve.proxies.exchange.request_body import HIGH_WATER_BYTES, RequestBody

END = {"type": "http.request", "body": b"", "more_body": False}


def test_a_request_without_a_body_is_one_empty_message_and_then_silence_until_the_end() -> None:
    async def test() -> None:
        body = RequestBody(is_ended=True)
        assert await body.receive() == END
        waiting = asyncio.create_task(body.receive())
        await asyncio.sleep(0)
        assert not waiting.done()
        body.close()
        assert await waiting == {"type": "http.disconnect"}
        assert await body.receive() == {"type": "http.disconnect"}

    run(test)


def test_the_last_chunk_says_so_if_the_end_is_known_by_then() -> None:
    async def test() -> None:
        body = RequestBody(is_ended=False)
        body.feed(b"one")
        body.feed(b"two")
        assert await body.receive() == {"type": "http.request", "body": b"one", "more_body": True}
        body.end()
        assert await body.receive() == {"type": "http.request", "body": b"two", "more_body": False}

    run(test)


def test_an_end_that_comes_late_is_a_message_of_its_own() -> None:
    async def test() -> None:
        body = RequestBody(is_ended=False)
        body.feed(b"one")
        assert (await body.receive())["more_body"]
        waiting = asyncio.create_task(body.receive())
        await asyncio.sleep(0)
        body.end()
        assert await waiting == END

    run(test)


def test_receivers_may_be_cancelled_without_harm_to_others() -> None:
    async def test() -> None:
        body = RequestBody(is_ended=False)
        first = asyncio.create_task(body.receive())
        second = asyncio.create_task(body.receive())
        await asyncio.sleep(0)
        first.cancel()
        body.feed(b"data")
        assert (await second)["body"] == b"data"
        await asyncio.wait([first])

    run(test)


def test_a_full_buffer_asks_to_wait_until_half_of_it_was_taken() -> None:
    async def test() -> None:
        body = RequestBody(is_ended=False)
        quarter = bytes(HIGH_WATER_BYTES // 4)
        for _ in range(4):
            assert body.feed(quarter) is None
        room = body.feed(quarter)
        assert room is not None
        for _ in range(2):
            await body.receive()
            assert not room.done()
        await body.receive()
        assert room.done()

    run(test)


def test_closing_resumes_the_socket_and_drops_further_data() -> None:
    async def test() -> None:
        body = RequestBody(is_ended=False)
        room = body.feed(bytes(HIGH_WATER_BYTES + 1))
        assert room is not None
        body.close()
        await poll_for(room.done)
        assert body.feed(bytes(HIGH_WATER_BYTES + 1)) is None
        assert body.received_bytes == 2 * (HIGH_WATER_BYTES + 1)
        assert await body.receive() == {"type": "http.disconnect"}

    run(test)
