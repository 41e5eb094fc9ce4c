"""The secrets with which the processes of a Dask cluster authenticate each other on channels.

The first supervisor of a scheduler generates a secret. Supervisors send it to all Hosts, and programs fetch
it with their Dask client. A restarted scheduler has a new secret. Workers and programs that outlived the old
scheduler keep both secrets, so they can connect before and after they get the new one. No secret is written
to a file, a command line or a log.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence

#: How many secrets a process keeps.
MAX_SECRETS = 4
#: Size of the mark with which two processes find a common secret. The mark does not reveal the secret.
MARK_BYTES = 8
_SECRET_BYTES = 32


class ChannelSecret:
    """A secret, random by default. Its value is not part of its repr, so it does not appear in logs."""

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
        """Return the HMAC of a message, which proves knowledge of the secret."""
        return hmac.digest(self._value, message, hashlib.sha256)

    async def reveal(self) -> bytes:
        """Return the secret's value: a verb of the supervisor, which answers over Dask's connections."""
        return self._value


async def _nothing() -> bytes:
    raise OSError("this process has no scheduler to ask for the secret of its cluster")


class Keyring:
    """The secrets that one process knows.

    Parameters
    ----------
    fetch : callable, optional
        Returns the value of the cluster's current secret.
    """

    def __init__(self, fetch: Callable[[], Awaitable[bytes]] = _nothing) -> None:
        self._fetch = fetch
        self._secrets: dict[bytes, ChannelSecret] = {}
        #: Whether the cluster may have a newer secret than those in `marks`.
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
        """Add a secret as the preferred one, and drop the oldest if there are too many."""
        self.is_outdated = False
        self._secrets.pop(secret.mark, None)
        self._secrets[secret.mark] = secret
        while len(self._secrets) > MAX_SECRETS:
            del self._secrets[next(iter(self._secrets))]

    async def resume(self) -> None:
        """Fetch the secret before the next dial, because this process has connected to another scheduler."""
        self.is_outdated = True

    async def renew(self, known: Sequence[bytes]) -> bool:
        """Fetch the cluster's secret; return True if it is new. Concurrent dials share one request."""
        async with self._fetching:
            if self.marks == known:
                self.add(ChannelSecret(await self._fetch()))
            return self.marks != known
