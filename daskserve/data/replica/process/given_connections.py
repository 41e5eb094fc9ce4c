"""The connections of a proxy that one child process serves.

The proxy accepts them, and keeps a copy of each socket. The messages on a pair of sockets are numbers of
slots in a `daskserve.loops.connection_table.ConnectionTable`::

    proxy                                       child
      slot, with the connection      ------->     takes it
      slot + `GIVE_BACK`             ------->     gives it back once it has no request
                                     <-------   slot: the connection has ended
                                     <-------   slot + `GIVE_BACK`: it is given back

A connection that comes back continues at another process, with the bytes in its record. The connections of
a child that has ended do so, too. Only those of which a part of a response was sent are closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from daskserve.loops.connection_table import (
    EVICT,
    GIVE_BACK,
    SLOT_NUMBER,
    ConnectionState,
    ConnectionTable,
    LostAttempt,
    MovedConnection,
    receive_message,
)
from daskserve.loops.tcp_counts import Transferred, transferred

#: Interval at which the proxy checks whether a child has taken its connections; how long a child may take
#: none of them; and how long it then gets no more.
CHECK_S, UNTAKEN_S, BLOCKED_S = 0.05, 0.2, 1.0
#: How many messages are read, and how many connections of a lost child continue, in one iteration of the
#: event loop; each takes 0.1 ms.
_AT_ONCE = 100


@dataclass
class _Given:
    """One connection."""

    sock: socket.socket
    stays: bool
    #: What had been read and written before.
    before: Transferred | None


class GivenConnections:
    """The connections of one port that one child serves.

    Parameters
    ----------
    slots : int
        Maximum number of connections.
    serve : callable
        Continues with a connection that has come back.

    Attributes
    ----------
    own : frozenset
        The endpoints that the child answers.
    """

    own: frozenset[str] = frozenset()

    def __init__(self, slots: int, serve: Callable[[MovedConnection], object]) -> None:
        self._serve = serve
        self._ours, self._theirs = socket.socketpair()
        self._table = ConnectionTable(slots)
        self._ours.setblocking(False)
        self._free = list(range(slots - 1, -1, -1))
        self._given: dict[int, _Given] = {}
        #: The connections that the child has not taken yet, with the times when they were given.
        self._untaken: dict[int, float] = {}
        self._asked: deque[int] = deque()
        self._check: asyncio.TimerHandle | None = None
        self._blocked_until = float("-inf")
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._given)

    @property
    def files(self) -> list[int]:
        """The descriptors that the child needs: its end of the pair, and the memory of the table."""
        return [self._theirs.fileno(), self._table.fileno()]

    def open(self) -> None:
        """Read the child's messages on the running event loop from now on. Idempotent."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._ours, self._read)

    @property
    def has_room(self) -> bool:
        """Whether the child can get another connection."""
        return self._loop is not None and bool(self._free) and self._loop.time() >= self._blocked_until

    def give(self, moved: MovedConnection) -> bool:
        """Give the child a connection, of which nothing is received yet; return whether that succeeded."""
        assert self._loop is not None
        slot = self._free.pop()
        self._table.reset(slot)
        before = transferred(moved.sock)
        try:
            socket.send_fds(self._ours, [SLOT_NUMBER.pack(slot)], [moved.sock.fileno()])
        except OSError:  # the child has ended, or takes no messages
            self._free.append(slot)
            self._blocked_until = self._loop.time() + BLOCKED_S
            return False
        self._given[slot] = _Given(moved.sock, moved.stays, before)
        self._untaken[slot] = self._loop.time()
        if self._check is None:
            self._check = self._loop.call_later(CHECK_S, self._find_untaken)
        return True

    def ask_back(self, count: int) -> None:
        """Let the child give back some connections, each once it has no request."""
        found = [slot for slot, each in self._given.items() if not each.stays]
        self._asked += [slot | GIVE_BACK for slot in found[len(found) - count :]]
        self._ask()

    def _ask(self) -> None:
        """Send the messages that ask for connections; the pair holds a few hundred at a time."""
        while self._asked and self._loop is not None:
            try:
                self._ours.send(SLOT_NUMBER.pack(self._asked[0]))
            except BlockingIOError:
                self._loop.call_later(CHECK_S, self._ask)
                return
            except OSError:
                return
            self._asked.popleft()

    def evict(self) -> None:
        """Let the child close the connection that has been idle longest."""
        self._send(EVICT)

    def _send(self, message: int) -> None:
        with suppress(OSError):  # the child has ended, or takes no messages
            self._ours.send(SLOT_NUMBER.pack(message))

    def _find_untaken(self) -> None:
        """Take connections back from a child that does not take them, because it is blocked."""
        assert self._loop is not None
        self._check = None
        for slot in [each for each in self._untaken if self._table.state(each) != ConnectionState.GIVEN]:
            del self._untaken[slot]
        if not self._untaken:
            return
        if self._loop.time() - min(self._untaken.values()) >= UNTAKEN_S:
            self._blocked_until = self._loop.time() + BLOCKED_S
            self.withdraw()
        else:
            self._check = self._loop.call_later(CHECK_S, self._find_untaken)

    def withdraw(self) -> None:
        """Continue elsewhere with the connections that the child has not taken.

        They are read at the child's end of the pair, so either process gets each of them, never both.
        """
        for slot in _messages(self._theirs):
            if not slot & GIVE_BACK:  # neither asked back nor evicted
                self._come_back(slot)

    def _read(self) -> None:
        """Read some messages of the child."""
        with suppress(OSError):  # there are none
            self._handle(self._ours.recv(_AT_ONCE * SLOT_NUMBER.size))

    def _read_all(self) -> None:
        """Read all messages of a child that sends no more."""
        data = b""
        with suppress(OSError):  # there are no more
            while True:
                data += self._ours.recv(_AT_ONCE * SLOT_NUMBER.size)
        self._handle(data)

    def _handle(self, messages: bytes) -> None:
        for (slot,) in SLOT_NUMBER.iter_unpack(messages):
            if slot & GIVE_BACK:
                self._note_untaken(slot & ~GIVE_BACK)
                self._come_back(slot & ~GIVE_BACK)
            elif (found := self._pop(slot)) is not None:
                found.sock.close()

    def _note_untaken(self, slot: int) -> None:
        """Pause if a child returns a connection that it could not take, for lack of file descriptors."""
        if self._loop is not None and self._table.state(slot) == ConnectionState.GIVEN:
            self._blocked_until = self._loop.time() + BLOCKED_S

    def _pop(self, slot: int) -> _Given | None:
        self._untaken.pop(slot, None)
        found = self._given.pop(slot, None)
        if found is not None:
            self._free.append(slot)
        return found

    def _come_back(self, slot: int, lost: LostAttempt | None = None) -> None:
        found = self._pop(slot)
        if found is None:
            return
        counts = None
        if lost is not None and found.before is not None and (now := transferred(found.sock)) is not None:
            counts = now.since(found.before)
        state, received = self._table.read(slot, counts)
        if state == ConnectionState.FIXED:
            found.sock.close()
            return
        # A request that comes back from a child belongs to another process.
        stays = found.stays or (bool(received) and lost is None)
        error = lost if state == ConnectionState.BEGUN else None
        self._serve(MovedConnection(found.sock, received, error, stays))

    def recover(self, lost: LostAttempt) -> None:
        """Continue elsewhere with the connections of a child whose process has ended; then `close`.

        Parameters
        ----------
        lost : LostAttempt
            The attempt of the requests that had begun.
        """
        if self._loop is not None:
            self._read_all()
            self._loop.remove_reader(self._ours)
        self._recover_some(lost)

    def _recover_some(self, lost: LostAttempt) -> None:
        # A child may have thousands of connections, and the event loop has other work.
        for slot in list(islice(self._given, _AT_ONCE)):
            self._come_back(slot, lost)
        if self._given and self._loop is not None:
            self._loop.call_soon(self._recover_some, lost)
        else:
            self.close()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        if self._loop is not None:
            self._read_all()
            self._loop.remove_reader(self._ours)
            self._loop = None
        if self._check is not None:
            self._check.cancel()
            self._check = None
        for each in self._given.values():
            each.sock.close()
        self._given.clear()
        self._ours.close()
        self._theirs.close()
        self._table.close()


def _messages(sock: socket.socket) -> Iterator[int]:
    """Yield the messages that wait at the child's end, and close the copies of connections in them."""
    while True:
        try:
            message = receive_message(sock)
        except BlockingIOError:
            return
        if message is None:
            return
        slot, files = message
        for each in files:
            os.close(each)
        yield slot
