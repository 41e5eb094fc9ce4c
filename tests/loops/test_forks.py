"""The parts of its parent that a process forked by user code may keep."""

from __future__ import annotations

import os
import select
import socket
import sys
from contextlib import closing, suppress

import pytest
from tables import each_case

from daskserve.loops.forks import ForkGuard, end_fork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors are found in /proc")


def test_a_guard_cuts_connections_and_event_loops_and_nothing_else() -> None:
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    port = theirs.getsockname()[1]
    with closing(ours), closing(theirs):
        client = socket.create_connection(ours.getsockname())
        accepted, _ = ours.accept()
        to_peer = socket.create_connection(theirs.getsockname())
        pair = socket.socketpair()
        loop = select.epoll()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            with suppress(BaseException):
                theirs.close()  # it stands for another process
                ForkGuard(lambda: [f"tcp://127.0.0.1:{port}"]).cut_off()
                null = os.stat(os.devnull)
                cut = [
                    os.path.samestat(os.fstat(each.fileno()), null)
                    for each in (ours, accepted, to_peer, loop, client, *pair)
                ]
                os.write(writing, repr(cut).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reading, 100).decode() == repr([True] * 4 + [False] * 3)
        for each in (client, accepted, to_peer, *pair):
            each.close()
        loop.close()
        for descriptor in (reading, writing):
            os.close(descriptor)


@each_case("is_open", [True, False])
def test_a_guard_acts_in_forks_while_it_is_open(is_open: bool) -> None:
    guard = ForkGuard()
    guard.open()
    if not is_open:
        guard.close()
    with closing(select.epoll()) as loop:
        child = os.fork()
        if not child:
            is_cut = os.path.samestat(os.fstat(loop.fileno()), os.stat(os.devnull))
            os._exit(is_cut)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == is_open
    guard.close()


def test_a_fork_whose_code_has_returned_ends() -> None:
    child = os.fork()
    if not child:
        with suppress(BaseException):
            end_fork()
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
