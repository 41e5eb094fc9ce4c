"""The secrets by which the processes of a Dask cluster recognise each other on channels.

The first supervisor of a scheduler draws a secret. Supervisors give it to all Hosts; programs ask for it
over their Dask client. A scheduler that comes back has another one. Workers and programs that have outlived
the old scheduler keep both secrets, so they reach each other before and after they have learned the new one.
No secret is written to a file, a command line or a log.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence

#: How many secrets a process keeps.
MAX_SECRETS = 4
#: Size of the mark by which two processes find a secret that both know; it tells nothing about the secret.
MARK_BYTES = 8
_SECRET_BYTES = 32


class ChannelSecret:
    """A secret that is random unless given; its value stands in no repr, so in no log."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes | None = None) -> None:
        self._value = secrets.token_bytes(_SECRET_BYTES) if value is None else value

    def __repr__(self) -> str:
        return "<ChannelSecret>"

    @property
    def mark(self) -> bytes:
        """The name of the secret."""
        return self.proof(b"mark")[:MARK_BYTES]

    def proof(self, message: bytes) -> bytes:
        """Return what only a process that knows the secret can compute from a message."""
        return hmac.digest(self._value, message, hashlib.sha256)

    async def reveal(self) -> bytes:
        """Return the value: a verb of the supervisor, which answers over Dask's connections."""
        return self._value


async def _nothing() -> bytes:
    raise OSError("this process has no scheduler to ask for the secret of its cluster")


class Keyring:
    """The secrets that one process knows.

    Parameters
    ----------
    fetch : callable, optional
        Returns the value of the cluster's present secret.
    """

    def __init__(self, fetch: Callable[[], Awaitable[bytes]] = _nothing) -> None:
        self._fetch = fetch
        self._secrets: dict[bytes, ChannelSecret] = {}
        #: Whether there may be another secret than those known, so that a worker would refuse all of them.
        self.is_outdated = True
        self._fetching = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Keyring of {len(self._secrets)}>"

    @property
    def marks(self) -> Sequence[bytes]:
        """The marks of the secrets, the latest first."""
        return list(reversed(self._secrets))

    def find(self, mark: bytes) -> ChannelSecret | None:
        """Return the secret with a mark; None if this process does not know it."""
        return self._secrets.get(mark)

    def add(self, secret: ChannelSecret) -> None:
        """Prefer a secret from now on; of many older ones, the oldest is forgotten."""
        self.is_outdated = False
        self._secrets.pop(secret.mark, None)
        self._secrets[secret.mark] = secret
        while len(self._secrets) > MAX_SECRETS:
            del self._secrets[next(iter(self._secrets))]

    async def resume(self) -> None:
        """Ask for the secret before the next dial: this process has connected to another scheduler."""
        self.is_outdated = True

    async def renew(self, known: Sequence[bytes]) -> bool:
        """Fetch the cluster's secret; return True if it is new. Concurrent dials share one request."""
        async with self._fetching:
            if self.marks == known:
                self.add(ChannelSecret(await self._fetch()))
            return self.marks != known
