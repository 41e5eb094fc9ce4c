"""The child's side of `daskserve.cluster.worker.child`.

It imports neither Dask nor modules that import Dask, because this would take longer than the rest of the
start. `daskserve.cluster.worker.child_view` imports them when user code needs the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from daskserve.cluster.actors.recent_log import LogFile
from daskserve.cluster.channel.channel import Channel, Dispatch
from daskserve.cluster.channel.wire.segments import Segments
from daskserve.cluster.channel.wire.transport import SocketTransport
from daskserve.cluster.protocols.base import Parent
from daskserve.cluster.worker.interpreter import CollectionPace
from daskserve.cluster.worker.log_thread import LogThread
from daskserve.cluster.worker.stack_dump import answer_with_stacks
from daskserve.cluster.worker.tagging import mark_output
from daskserve.common import settings
from daskserve.common.types import ActorAddress, ActorRequest, Envelope
from daskserve.internals.python import run_exit_functions
from daskserve.loops.event_loop import new_event_loop
from daskserve.loops.forks import ForkGuard
from daskserve.loops.termination import on_sigterm
from daskserve.loops.threads import MainThread, StartThread
from daskserve.telemetry.histogram import latency_buckets_s
from daskserve.telemetry.logs.process import process_logs

#: Interval at which a child checks for a new parent process; needed only if a fork holds its lifeline open.
PARENT_CHECK_S = 1.0
#: How long a process waits for its main thread to run its exit functions.
MAIN_GRACE_S = 0.2
#: The last part of the time after SIGTERM, as a share, in which a process exits even if the parent has not
#: ended it.
EXIT_SHARE = 0.1
#: From -1000 to 1000: Linux kills processes with higher scores first. Other processes have 0.
OOM_SCORE = 500
#: Returns a function that takes the parent's requests, and a function that requests the replacement of this
#: process after SIGTERM.
Factory: TypeAlias = Callable[[StartThread, Parent], tuple[Dispatch, Callable[[], None]]]


#: Maximum length of the name of files from the parent, and maximum number of files per name.
NAME_BYTES, MAX_FILES = 1024, 16


class _Parent:
    """The parent, and the values that it has sent besides its channel."""

    def __init__(self, sockets: socket.socket) -> None:
        self.address = f"parent://{os.getppid()}"
        self._sockets = sockets
        sockets.setblocking(False)
        self._taken: dict[str, list[int]] = {}
        self.channel: Channel | None = None

    def request(self, name: str, envelope: Envelope) -> ActorRequest:
        assert self.channel is not None
        return self.channel.request(ActorAddress(name, self.address, 0), envelope)

    def take_files(self, name: str) -> list[int]:
        while name not in self._taken:
            sent, files, _, _ = socket.recv_fds(self._sockets, NAME_BYTES, MAX_FILES)
            for each in files:
                os.set_inheritable(each, False)
            self._taken[sent.decode()] = files
        return self._taken.pop(name)


class _ReplacedFirst:
    """Handles SIGTERM: the parent replaces this process, which ends afterwards or when its time is over."""

    def __init__(self, grace_s: float) -> None:
        self._serves_for_s = grace_s * (1 - EXIT_SHARE)
        self._serving: tuple[asyncio.AbstractEventLoop, Callable[[], None]] | None = None

    def open(self, leave: Callable[[], None]) -> None:
        """Handle SIGTERM gracefully from now on; call this on the serving loop."""
        self._serving = asyncio.get_running_loop(), leave

    def __call__(self, done: Callable[[], None]) -> None:
        if self._serving is None:
            done()
            return
        loop, leave = self._serving

        def begin() -> None:
            leave()
            loop.call_later(self._serves_for_s, done)

        try:
            loop.call_soon_threadsafe(begin)
        except RuntimeError:  # the loop is closed: the process is already ending
            done()


def prepare(options: Mapping[str, Any]) -> Callable[[socket.socket, int], None]:
    """Import the child's factory; return the main function, which takes the socket and the lifeline."""
    settings.given_process.set(settings.ProcessSettings(**options["settings"]))
    settings.given_metrics.set(settings.MetricsSettings(**options["metrics"]))
    latency_buckets_s()  # read here, because other threads do not have this context
    module, _, name = options["factory"].partition(":")
    # Optional, because an older parent with a compatible version does not send all of them.
    log, dump, sockets = (options.get(each) for each in ("log", "dump", "sockets"))
    return partial(_run, getattr(importlib.import_module(module), name), log, dump, sockets)


def _run(
    factory: Factory,
    log: int | None,
    dump: int | None,
    sockets: int | None,
    pair: socket.socket,
    lifeline: int,
) -> None:
    _end_with_parent(lifeline)
    _be_killed_before_parent()
    if dump is not None:
        answer_with_stacks(dump)
    switch_interval_s = settings.process().switch_interval_s
    if switch_interval_s is not None:
        # The same interval as in the worker, so that user code delays the channel less.
        sys.setswitchinterval(switch_interval_s)
    CollectionPace(settings.process().gc_threshold).open()
    forks = ForkGuard()
    forks.open()
    if settings.process().log_thread:
        recent = None if log is None else LogFile(log)
        logs = LogThread(recent=recent)
        logs.open()  # flushed by the exit functions
        mark_output(logs.logs, logs.take_print)
        if recent is not None:
            logs.logs.keep_access = recent.take_access
        process_logs.set(logs.logs)
    # Python's own handler would raise an error in a request or in the loop of user code.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    leave = _ReplacedFirst(settings.process().termination_grace_s)
    if settings.process().termination_grace_s > 0:
        on_sigterm(leave)
    main, is_ending = MainThread(), threading.Lock()
    # Within this context, which contains the worker's settings.
    parent = _Parent(socket.socket() if sockets is None else socket.socket(fileno=sockets))
    serve = partial(copy_context().run, _serve, factory, pair, parent, main, is_ending, leave)
    threading.Thread(target=serve, name="daskserve-channel", daemon=True).start()
    status: Any = 0
    try:
        main.run()
    except (SystemExit, KeyboardInterrupt) as error:  # raised by a signal handler
        status = getattr(error, "code", 1)
    except Exception:  # raised by a signal handler, and ends a program
        traceback.print_exc()
        status = 1
    _end(is_ending, status if isinstance(status, int) else int(status is not None))
    threading.Event().wait()  # until the other thread ends the process


def _serve(
    factory: Factory,
    pair: socket.socket,
    parent: _Parent,
    main: MainThread,
    is_ending: threading.Lock,
    leave: _ReplacedFirst,
) -> None:
    """Serve the parent until its channel ends; then end the process, even if user code is stuck."""
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_answer(factory, pair, parent, main, leave))
    finally:
        main.end()
        if not main.has_ended.wait(MAIN_GRACE_S):
            _end(is_ending, 0)


async def _answer(
    factory: Factory, pair: socket.socket, parent: _Parent, main: MainThread, leave: _ReplacedFirst
) -> None:
    transport = SocketTransport(pair, parent.address)
    transport.share(Segments(), begins=False)
    dispatch, when_leaving = factory(main.start, Parent(parent.request, parent.take_files))
    leave.open(when_leaving)
    channel = parent.channel = Channel(transport, dispatch, first_stream=1)
    await channel.serve()


def _end(is_ending: threading.Lock, status: int) -> None:
    if not is_ending.acquire(blocking=False):
        return  # the other thread ends the process
    # A regular interpreter shutdown takes 0.1 s longer and waits for threads of user code.
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the stream may be missing, closed or full
            stream.flush()
    os._exit(status)


def _be_killed_before_parent() -> None:
    """Let Linux end this process rather than the worker when the machine is out of memory."""
    with contextlib.suppress(OSError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")


def _end_with_parent(lifeline: int) -> None:
    group, parent = os.getpgrp(), os.getppid()
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
        # The resulting signal, SIGIO, has no handler, so it ends the process even if native code is running.
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)

    poll = select.poll()
    poll.register(lifeline)

    def wait() -> None:
        while not poll.poll(PARENT_CHECK_S * 1000) and os.getppid() == parent:
            pass
        os.killpg(group, signal.SIGKILL)

    threading.Thread(target=wait, name="daskserve-lifeline", daemon=True).start()
