"""The handshake of a channel: who is accepted, and what others can do."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from wires import MemoryWire, connected

from daskserve.cluster.channel.connect.handshake import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    HELLO_BYTES,
    LOG_PERIOD_S,
    MAGIC,
    PROOF_BYTES,
    TIMEOUT_S,
    Admission,
    UntrustedPeerError,
    introduce,
    relay,
)
from daskserve.cluster.channel.connect.keyring import MAX_SECRETS, ChannelSecret, Keyring

pytestmark = pytest.mark.virtual_time


SECRET, OTHER = ChannelSecret(), ChannelSecret()


def keyring(*secrets: ChannelSecret) -> Keyring:
    found = Keyring()
    for secret in secrets:
        found.add(secret)
    return found


@pytest.fixture(autouse=True)
@asynccontextmanager
async def leaves_no_task() -> AsyncIterator[None]:
    yield
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_two_ends_that_share_a_secret_get_in() -> None:
    for dialler, listener in [
        ([SECRET], [SECRET]),
        ([SECRET], [SECRET, OTHER]),  # a program from before the scheduler's return
        ([OTHER, SECRET], [OTHER]),  # a worker that has not heard of it
        ([ChannelSecret() for _ in range(MAX_SECRETS - 1)] + [SECRET], [SECRET]),
    ]:
        near, far = connected()
        admitting = asyncio.create_task(Admission(keyring(*listener)).admit(far))
        await introduce(near, keyring(*dialler))
        assert await admitting, dialler
        assert not near.is_aborted, dialler
        assert not far.is_aborted, dialler
        assert (near.unread_bytes, far.unread_bytes) == (0, 0), dialler
        assert len(near.sent) == HELLO_BYTES + PROOF_BYTES, dialler
        assert len(far.sent) == ANSWER_BYTES + len(MAGIC), dialler
        for each in (*dialler, *listener):
            assert each._value not in near.sent + far.sent, dialler


async def test_an_end_with_another_secret_is_a_stranger() -> None:
    for known in ([], [OTHER]):
        near, far = connected()
        admitting = asyncio.create_task(Admission(keyring(SECRET)).admit(far))
        with pytest.raises(UntrustedPeerError, match="belongs to another cluster") as caught:
            await introduce(near, keyring(*known))
        assert not caught.value.begun
        assert not await admitting
        assert far.is_aborted


async def test_a_worker_without_a_secret_admits_no_connection() -> None:
    near, far = connected()
    admitting = asyncio.create_task(Admission(Keyring()).admit(far))
    with pytest.raises(UntrustedPeerError):
        await introduce(near, Keyring())
    assert not await admitting


class Bomb:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise AssertionError("unpickled")


async def test_other_bytes_are_refused_after_a_hundred_of_them() -> None:
    for sent in [
        b"GET / HTTP/1.1\r\n" * 10,
        pickle.dumps(Bomb()) * 10,
        b"dsv1" + (1).to_bytes(4, "little") + (2 << 30).to_bytes(8, "little") + bytes(100),
        MAGIC + bytes(HELLO_BYTES),
    ]:
        near, far = connected()
        await near.send(sent)
        assert not await Admission(keyring(SECRET)).admit(far), sent
        assert far.is_aborted, sent
        assert len(sent) - far.unread_bytes == HELLO_BYTES, sent


async def hello_of(near: MemoryWire) -> bytes:
    """Send the hello of a stranger who knows the secret's mark, which is sent unencrypted."""
    hello = MAGIC + SECRET.mark.ljust(HELLO_BYTES - len(MAGIC) - CHALLENGE_BYTES, b"\0") + bytes(32)
    await near.send(hello)
    return await near.receive(ANSWER_BYTES)


async def test_a_dialler_that_only_knows_the_mark_is_refused() -> None:
    for forge in (lambda answer: bytes(PROOF_BYTES), lambda answer: answer[-PROOF_BYTES:]):
        near, far = connected()
        admitting = asyncio.create_task(Admission(keyring(SECRET)).admit(far))
        await near.send(forge(await hello_of(near)))
        assert not await admitting
        assert far.sent.count(MAGIC) == 0


async def test_a_recorded_dialler_cannot_be_played_again() -> None:
    near, far = connected()
    admitting = asyncio.create_task(Admission(keyring(SECRET)).admit(far))
    await introduce(near, keyring(SECRET))
    assert await admitting
    again, far = connected()
    await again.send(near.sent)
    assert not await Admission(keyring(SECRET)).admit(far)


async def test_a_listener_that_does_not_know_the_secret_is_found_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another program has taken a worker's port. It may have recorded an answer of the worker."""
    near, far = connected()
    admitting = asyncio.create_task(Admission(keyring(SECRET)).admit(far))
    await introduce(near, keyring(SECRET))
    assert await admitting
    recorded = far.sent
    for answer in (
        recorded,
        bytes(ANSWER_BYTES - 1) + b"\1",
        SECRET.mark + bytes(ANSWER_BYTES),
        b"x" * 99,
    ):
        near, far = connected()
        await far.send(answer)
        with pytest.raises(OSError, match="the worker is not a worker of this cluster"):
            await introduce(near, keyring(SECRET))
        assert len(near.sent) == HELLO_BYTES, "it gets no proof"
    assert "it did not prove that it knows the secret" in caplog.text


async def test_a_silent_connection_is_closed_after_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    for sent in (b"", MAGIC, bytes(HELLO_BYTES - 1)):
        near, far = connected()
        await near.send(sent)
        began = asyncio.get_running_loop().time()
        assert not await Admission(keyring(SECRET)).admit(far)
        assert far.is_aborted
        assert asyncio.get_running_loop().time() - began == pytest.approx(TIMEOUT_S)
    assert "no handshake within 10 s" in caplog.text


async def test_too_many_handshakes_end_the_oldest_and_let_others_in() -> None:
    admission = Admission(keyring(SECRET), max_pending=3)
    silent = [connected() for _ in range(100)]
    admitting = []
    for _, far in silent:
        admitting.append(asyncio.create_task(admission.admit(far)))
        await asyncio.sleep(0)
    near, far = connected()
    entering = asyncio.create_task(admission.admit(far))
    await introduce(near, keyring(SECRET))
    assert await entering
    await asyncio.sleep(1)
    assert [each.done() for each in admitting] == [True] * 98 + [False] * 2
    assert admission.refused == {"late": 98, "stranger": 0}
    admission.close()
    assert await asyncio.gather(*admitting) == [False] * 100
    assert all(far.is_aborted for _, far in silent)


async def test_a_cancelled_handshake_closes_its_connection() -> None:
    _, far = connected()
    admitting = asyncio.create_task(Admission(keyring(SECRET)).admit(far))
    await asyncio.sleep(0)
    admitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await admitting
    assert far.is_aborted


async def test_refused_connections_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    admission = Admission(keyring(SECRET))

    async def refuse(count: int) -> None:
        for _ in range(count):
            near, far = connected()
            await near.send(b"x" * HELLO_BYTES)
            assert not await admission.admit(far)

    await refuse(50)
    assert len(caplog.records) == 1
    await asyncio.sleep(LOG_PERIOD_S)
    await refuse(50)
    near, far = connected()
    near.abort()
    assert not await admission.admit(far)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "Refused a connection from the program: it does not begin with a handshake (connections refused "
        "so far: 1)"
    )
    assert "so far: 51" in second


@pytest.mark.parametrize("secret", [SECRET, OTHER])
async def test_a_scheduler_forwards_the_handshake_between_connections_of_two_kinds(
    secret: ChannelSecret,
) -> None:
    (near, middle), (other, far) = connected(), connected()
    relaying = asyncio.create_task(relay(middle, other))
    admitting = asyncio.create_task(Admission(keyring(SECRET)).admit(far))
    if secret is SECRET:
        await introduce(near, keyring(secret))
        await relaying
    else:
        with pytest.raises(UntrustedPeerError):
            await introduce(near, keyring(secret))
        near.abort()
        with pytest.raises(OSError, match="has ended"):
            await relaying
    assert await admitting == (secret is SECRET)
