"""The handshake at the start of a channel: each end proves that it knows a secret of the Dask cluster.

Problem: the frames of a channel run code, and may be large. A stranger who can reach a worker's port must not
be able to send frames. Choice: four messages of fixed sizes come before the first frame. The secret itself is
not sent. Until both ends have proved that they know the secret, they read and unpickle nothing else::

    dialler    hello: magic, marks of the secrets that it knows, challenge     68 bytes
    listener   answer: mark of one that it knows as well, challenge, proof     72 bytes
    dialler    proof                                                           32 bytes
    listener   magic, after which both ends send frames                         4 bytes

A proof is an HMAC of the role, the hello and the listener's challenge, so it cannot be used on another
connection or for the other role. The handshake neither encrypts nor signs the frames that follow. Use TLS
against an attacker who can read or change the traffic between two machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from typing import Protocol

from daskserve.cluster.channel.connect.keyring import MARK_BYTES, MAX_SECRETS, ChannelSecret, Keyring
from daskserve.common.formatting import shown
from daskserve.errors import ActorLostError

logger = logging.getLogger("daskserve.channel")

MAGIC = b"dsvh"
CHALLENGE_BYTES = PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + MAX_SECRETS * MARK_BYTES + CHALLENGE_BYTES
ANSWER_BYTES = MARK_BYTES + CHALLENGE_BYTES + PROOF_BYTES
#: The answer to a dialler that does not know any of the listener's secrets.
REFUSAL = bytes(ANSWER_BYTES)

#: Time for the whole handshake at the listener.
TIMEOUT_S = 10.0
#: Maximum number of handshakes in progress at a listener: more than a cluster has workers that dial at once.
MAX_PENDING = 1024
#: Minimum time between two log lines about connections that were refused.
LOG_PERIOD_S = 60.0


class UntrustedPeerError(ActorLostError):
    """The two ends of a connection do not share a secret."""


class Wire(Protocol):
    """A new connection, before its frames."""

    @property
    def peer_address(self) -> str:
        """Address of the other end."""

    async def send(self, data: bytes) -> None:
        """Send bytes; raise `OSError` if the connection is lost."""

    async def receive(self, size_bytes: int) -> bytes:
        """Return exactly that many bytes.

        Raises
        ------
        OSError
            The connection is lost.
        ValueError
            The other end has sent something else.
        """

    def abort(self) -> None:
        """End the connection at once."""


def _proof(secret: ChannelSecret, role: bytes, hello: bytes, challenge: bytes) -> bytes:
    return secret.proof(role + hello + challenge)


async def introduce(wire: Wire, keyring: Keyring) -> None:
    """Perform the handshake as the dialler.

    Raises
    ------
    UntrustedPeerError
        The listener knows none of this process's secrets.
    OSError
        The connection was lost, or the listener did not prove that it knows the secret.
    """
    marks = keyring.marks
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    hello = MAGIC + b"".join(marks).ljust(MAX_SECRETS * MARK_BYTES, b"\0") + challenge
    try:
        await wire.send(hello)
        answer = await wire.receive(ANSWER_BYTES)
        if answer == REFUSAL:
            raise UntrustedPeerError(
                f"{wire.peer_address} does not know the secret of this Dask cluster: it belongs to another "
                "cluster, or has just joined.",
                begun=False,
            )
        mark, rest = answer[:MARK_BYTES], answer[MARK_BYTES:]
        secret = keyring.find(mark) if mark in marks else None
        theirs, proof = rest[:CHALLENGE_BYTES], rest[CHALLENGE_BYTES:]
        if secret is None or not hmac.compare_digest(proof, _proof(secret, b"listener", hello, theirs)):
            raise ValueError("it did not prove that it knows the secret of this Dask cluster")
        await wire.send(_proof(secret, b"dialler", hello, theirs))
        if await wire.receive(len(MAGIC)) != MAGIC:
            raise ValueError("it sent something other than the end of the handshake")
    except ValueError as error:
        # The worker's port may now belong to another program.
        logger.warning("Closed the connection to %s: %s", wire.peer_address, error)
        raise OSError(f"{wire.peer_address} is not a worker of this cluster: {error}") from error


async def _examine(wire: Wire, keyring: Keyring) -> None:
    """Perform the handshake as the listener; raise `ValueError` if the dialler is refused."""
    hello = await wire.receive(HELLO_BYTES)
    if not hello.startswith(MAGIC):
        raise ValueError("it does not begin with a handshake")
    marks = hello[len(MAGIC) : -CHALLENGE_BYTES]
    for at in range(0, len(marks), MARK_BYTES):
        secret = keyring.find(marks[at : at + MARK_BYTES])
        if secret is not None:
            break
    else:
        await wire.send(REFUSAL)
        raise ValueError("it does not know the secret of this Dask cluster")
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    await wire.send(secret.mark + challenge + _proof(secret, b"listener", hello, challenge))
    proof = await wire.receive(PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"dialler", hello, challenge)):
        raise ValueError("it did not prove that it knows the secret of this Dask cluster")
    await wire.send(MAGIC)


async def relay(dialler: Wire, listener: Wire) -> None:
    """Forward the handshake between two connections of different kinds.

    Raises
    ------
    OSError, ValueError
        A connection was lost, or an end has sent something else.
    """
    async with asyncio.timeout(TIMEOUT_S):
        for size_bytes, source, sink in (
            (HELLO_BYTES, dialler, listener),
            (ANSWER_BYTES, listener, dialler),
            (PROOF_BYTES, dialler, listener),
            (len(MAGIC), listener, dialler),
        ):
            await sink.send(await source.receive(size_bytes))


class Admission:
    """The listener's side: admits connections whose other end knows a secret of the cluster.

    Parameters
    ----------
    max_pending : int
        Maximum number of handshakes in progress. A new connection beyond this number ends the oldest one,
        which is the least likely to complete.
    """

    def __init__(self, keyring: Keyring, *, max_pending: int = MAX_PENDING) -> None:
        self.keyring = keyring
        self._max_pending = max_pending
        #: The deadlines of the handshakes in progress, the oldest first.
        self._pending: dict[asyncio.Timeout, None] = {}
        #: How many connections were refused, by cause.
        self.refused: Counter[str] = Counter(late=0, stranger=0)
        self._quiet_until = 0.0

    def __repr__(self) -> str:
        return f"<Admission pending={len(self._pending)}>"

    async def admit(self, wire: Wire) -> bool:
        """Return whether a new connection may send frames; if not, it is closed."""
        try:
            async with self._limited():
                await _examine(wire, self.keyring)
            return True
        except TimeoutError:
            self.refused["late"] += 1
            self._note(wire, f"no handshake within {shown(TIMEOUT_S)} s, or too many others")
        except ValueError as error:
            self.refused["stranger"] += 1
            self._note(wire, str(error))
        except OSError as error:
            logger.debug("%s left during the handshake: %s", wire.peer_address, error)
        except BaseException:
            wire.abort()
            raise
        wire.abort()
        return False

    def close(self) -> None:
        """End all handshakes in progress."""
        while self._pending:
            self._end_oldest()

    @contextlib.asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        while len(self._pending) >= self._max_pending:
            self._end_oldest()
        async with asyncio.timeout(TIMEOUT_S) as deadline:
            self._pending[deadline] = None
            try:
                yield
            finally:
                self._pending.pop(deadline, None)

    def _end_oldest(self) -> None:
        oldest = next(iter(self._pending))
        del self._pending[oldest]
        if not oldest.expired():
            oldest.reschedule(0.0)

    def _note(self, wire: Wire, why: str) -> None:
        """Log a refused connection, at most one per `LOG_PERIOD_S`."""
        now = asyncio.get_running_loop().time()
        if now < self._quiet_until:
            return
        self._quiet_until = now + LOG_PERIOD_S
        logger.warning(
            "Refused a connection from %s: %s (connections refused so far: %d)",
            wire.peer_address,
            why,
            self.refused.total(),
        )
