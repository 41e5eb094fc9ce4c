"""Large answers to calls that stay in the process of their actor.

Problem: a caller often passes a result on without reading it, and a large one should not travel through the
caller's process. Choice: the answering end of a channel offers an answer of
`daskserve.common.types.KEPT_BYTES` or more. If the caller waits for the answer, the other end requests it at
once, which costs a round trip of small frames. If not, the answer stays. The caller may read it later or pass
it to other processes, which fetch it by its token. It is dropped when the caller closes its stream, or when
the connection ends.
"""

from __future__ import annotations

import itertools
import secrets

from daskserve.common.types import Payload, WorkerAddress
from daskserve.errors import UnavailableError


class KeptResults:
    """The answers that stay in one worker's process, by token."""

    def __init__(self, worker: WorkerAddress) -> None:
        self.worker = worker
        self._payloads: dict[str, Payload] = {}
        # A restarted worker at the same address must have different tokens.
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._payloads)

    def add(self, payload: Payload) -> str:
        """Keep an answer and return its token."""
        token = f"{self._prefix}-{next(self._numbers)}"
        self._payloads[token] = payload
        return token

    def find(self, token: str) -> Payload:
        """Return an answer; raise `UnavailableError` if it was dropped."""
        payload = self._payloads.get(token)
        if payload is None:
            raise UnavailableError(
                f"Worker {self.worker} no longer has a result to fetch: the process that made the call has "
                "ended, or dropped its response."
            )
        return payload

    def drop(self, token: str) -> Payload:
        """Remove an answer and return it."""
        return self._payloads.pop(token)
