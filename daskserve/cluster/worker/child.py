"""Child processes: another Python interpreter that does a part of this process's work, joined by one channel.

Problem: code that must not share this process's memory, interpreter lock or packages. Choice: a plain
subprocess of whatever interpreter is wanted. It inherits one end of a socket pair, over which a
`daskserve.cluster.channel.channel.Channel` runs as it does between workers, so nothing listens on a port and
nobody else can send to it. What the child does is named by an import path, because this layer may not import
those above it. A start goes like this::

    parent                                   child
      spawn, one line of options  ------->     first statements of `_BOOT`
                                  <-------     one line of facts: Python, daskserve, what went wrong
      channel                     <------>     `Channel` over the same socket

`_BOOT` runs under any Python 3 and needs no package, so that an interpreter that does not fit can say why.

A child leads a process group of its own, and all of the group end with it: what user code started there must
not outlive it, nor keep its end of the socket open. It ends with its parent by the *lifeline*, a pipe that
nobody writes to: when the parent is gone it is at its end. A thread waits for that, and on Linux the kernel
is asked for a signal besides, as a thread gets no turn while native code holds the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import dask.config
from distributed import Client

from daskserve import settings
from daskserve._version import __version__
from daskserve.cluster.actor_calls import control_call
from daskserve.cluster.base import Process
from daskserve.cluster.channel.channel import Channel
from daskserve.cluster.channel.transport import SocketTransport, Transport
from daskserve.cluster.distributed_internals import scheduler_address
from daskserve.cluster.link import Link, default_client, link_of
from daskserve.errors import ClusterUnreachableError, InstanceError, VersionMismatchError
from daskserve.internals.python import run_exit_functions
from daskserve.loops.event_loop import new_event_loop
from daskserve.options.environment import Interpreter
from daskserve.payload import dump_bytes, load_bytes
from daskserve.types import (
    ActorAddress,
    Envelope,
    InstanceName,
    Load,
    Payload,
    Receive,
    Send,
)

logger = logging.getLogger("daskserve.child")

#: A child that was told to end, or whose connection broke, gets this long before it is killed.
EXIT_GRACE_S = 0.5
#: Once a child is dead, what it had sent before is read for up to so long.
FLUSH_S = 0.5
#: How often a child looks whether its parent has changed, which only matters if a fork holds its lifeline.
PARENT_CHECK_S = 1.0

_BOOT = """\
import json, socket, sys
if sys.path and not sys.path[0]: del sys.path[0]
pair = socket.socket(fileno=int(sys.argv[1]))
line = b""
while not line.endswith(b"\\n"):
    part = pair.recv(65536)
    if not part: sys.exit(1)
    line += part
options = json.loads(line.decode())
if options["path"] is not None: sys.path[:] = options["path"]
facts = {"python": "%d.%d" % sys.version_info[:2], "version": None, "detail": ""}
main = None
try:
    from daskserve._version import __version__
    facts["version"] = __version__
    from daskserve.cluster.worker.child import prepare
    main = prepare(options)
except BaseException as error:
    facts["detail"] = "%s: %s" % (type(error).__name__, error)
pair.sendall((json.dumps(facts) + "\\n").encode())
if main is not None: main(pair, int(sys.argv[2]))
"""


# ---- the parent's side


class ChildProcess:
    """A running child. Make it with `start`; it is over when `ended` is set, whatever ended it."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, transport: Transport, lifeline: int
    ) -> None:
        self.name = name
        self.ended = asyncio.Event()
        #: Called once, on this loop, when the process has ended.
        self.on_end: Callable[[], None] | None = None
        self._process = process
        self._lifeline = lifeline
        self._channel = Channel(transport, _refuse, first_stream=0)
        self._serving = asyncio.create_task(self._channel.serve(), name=f"daskserve-child-{name}")
        self._watching = asyncio.create_task(self._watch(), name=f"daskserve-child-watch-{name}")

    def __repr__(self) -> str:
        return f"<ChildProcess {self.name} pid={self.pid} {self.fate if self.ended.is_set() else 'running'}>"

    @classmethod
    async def start(cls, name: str, interpreter: Interpreter, factory: str) -> ChildProcess:
        """Start an interpreter that serves what the factory at an import path makes.

        Parameters
        ----------
        name : str
            Shown in the process list.
        factory : str
            ``"package.module:name"``, a callable without arguments that makes a `Served`; looked up in the
            child.

        Raises
        ------
        VersionMismatchError
            The interpreter has no daskserve, or another version of it or of Python.
        InstanceError
            The interpreter cannot be run, or ended before it could say so much.
        """
        ours, theirs = socket.socketpair()
        lifeline_end, lifeline = os.pipe()
        try:
            with theirs:
                try:
                    process = await _spawn(interpreter, name, theirs.fileno(), lifeline_end)
                finally:
                    os.close(lifeline_end)
            try:
                facts = await _greet(ours, interpreter, factory)
                if facts is None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), EXIT_GRACE_S)
                    raise InstanceError(
                        f"The interpreter {interpreter.python} loaded nothing: it "
                        f"{fate_of(process.returncode)}. Its worker's log has what it wrote."
                    )
                problem = _mismatch(interpreter, facts)
                if problem is not None:
                    raise VersionMismatchError(problem)
            except BaseException:
                _kill_group(process.pid)
                await process.wait()
                raise
        except BaseException:
            ours.close()
            os.close(lifeline)
            raise
        return cls(name, process, SocketTransport(ours, f"child://{name}"), lifeline)

    @property
    def pid(self) -> int:
        """The process's id, which is also that of its group."""
        return self._process.pid

    @property
    def is_open(self) -> bool:
        """Whether it can still be reached."""
        return not self._channel.is_closed

    @property
    def fate(self) -> str:
        """How the process ended, to be put after its name; only once it has `ended`."""
        return fate_of(self._process.returncode)

    async def request(self, number: int, envelope: Envelope, receive: Receive, send: Send) -> Load:
        """Carry one request stream to the child; see `daskserve.cluster.channel.channel.Channel.request`.

        The number reaches `Served.dispatch` unchanged: it tells requests apart beyond their end.
        """
        address = ActorAddress(self.name, f"process {self.pid}", number)
        return await self._channel.request(address, envelope, receive, send)

    async def call(self, verb: str, payload: bytes | None = None, **message: Any) -> Any:
        """Call a verb of the child with plain values, and bytes of any size besides."""
        wrapped = None if payload is None else Payload(payload)
        return await control_call(partial(self.request, 0), verb, message, wrapped)

    async def end(self) -> None:
        """Let the process end by itself, kill it if it does not, and return when it has ended."""
        self._channel.close()
        await self.ended.wait()

    def kill(self) -> None:
        """Kill the process and all that it started; soon after it has `ended`."""
        _kill_group(self.pid)

    async def _watch(self) -> None:
        exiting = asyncio.create_task(self._process.wait())
        await asyncio.wait({exiting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if not exiting.done():
            # Without its channel it is of no use: on its way out, or to be put out of it.
            await asyncio.wait({exiting}, timeout=EXIT_GRACE_S)
        self.kill()
        await exiting
        await asyncio.wait({self._serving}, timeout=FLUSH_S)
        self._channel.close()
        await asyncio.wait({self._serving})
        os.close(self._lifeline)
        self.ended.set()
        if self.on_end is not None:
            self.on_end()


async def _spawn(interpreter: Interpreter, name: str, pair: int, lifeline: int) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *(interpreter.python, "-c", _BOOT, str(pair), str(lifeline), name),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(pair, lifeline),
            start_new_session=True,
            env=interpreter.variables,
        )
    except OSError as error:
        raise InstanceError(f"The interpreter {interpreter.python} cannot be run: {error}") from error


async def _greet(pair: socket.socket, interpreter: Interpreter, factory: str) -> dict[str, Any] | None:
    """Tell the child what to do and return what it says of itself; None if it says nothing."""
    loop = asyncio.get_running_loop()
    pair.setblocking(False)
    # Another interpreter has its own packages; with our path it would get half of ours.
    path = [entry or os.getcwd() for entry in sys.path] if interpreter.is_own else None
    line = b""
    try:
        await loop.sock_sendall(pair, json.dumps({"path": path, "factory": factory}).encode() + b"\n")
        while not line.endswith(b"\n"):
            part = await loop.sock_recv(pair, 65536)
            if not part:
                return None
            line += part
    except OSError:
        return None
    facts: dict[str, Any] = json.loads(line)
    return facts


def _mismatch(interpreter: Interpreter, facts: Mapping[str, Any]) -> str | None:
    """Return what is wrong with an interpreter, and the remedy; None if it fits."""
    who = f"The interpreter {interpreter.python} (Python {facts['python']})"
    remedy = f"{interpreter.python} -m pip install daskserve=={__version__}"
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if facts["python"] != here:
        return (
            f"{who} cannot run a replica of this worker, which runs Python {here}: user code cannot travel "
            f"between different Python versions. Make the environment with Python {here}."
        )
    if facts["version"] is None:
        return f"{who} has no daskserve ({facts['detail']}); install it there: {remedy}"
    if facts["version"] != __version__:
        return (
            f"{who} has daskserve {facts['version']}, its worker has {__version__}; install the same "
            f"version there: {remedy}"
        )
    if facts["detail"]:
        return f"{who} cannot load daskserve {__version__} ({facts['detail']}); install it anew: {remedy}"
    return None


def fate_of(status: int | None) -> str:
    """Return how a process ended, to be put after its name."""
    if status is None:
        return "does not answer"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


async def _refuse(name: str, number: int, envelope: Envelope, receive: Receive, send: Send) -> Load:
    raise InstanceError("A child process has nothing to ask of its parent.")


# ---- how the child reaches the Dask cluster


def dump_access(cluster: Process) -> bytes:
    """Return what a child needs to make its own way to the Dask cluster of a view of it."""
    client = cluster.link.client if isinstance(cluster.link, Link) else None
    address = None if client is None else scheduler_address(client)
    if client is None or address is None or address.startswith("inproc"):
        return dump_bytes(("", None))
    return dump_bytes((address, client.security))


class ChildView:
    """What code in a child has of the cluster: a way to make handles and clients work there.

    The connection is made when first needed, by a Dask client of the child's own.
    """

    def __init__(self, instance: InstanceName, access: bytes, connect_timeout_s: float) -> None:
        self.instance = instance
        self._access = access
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._client: Client | None = None

    @property
    def link(self) -> Link:
        """The child's link to the cluster.

        Raises
        ------
        InstanceError
            The cluster lives in a single process, which others cannot reach.
        ClusterUnreachableError
            The scheduler does not answer.
        """
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return link_of(self._client)

    def _connect(self) -> Client:
        address, security = load_bytes(self._access)
        if not address:
            raise InstanceError(
                "Code in a process of its own cannot reach this cluster, which lives within a single "
                "process; use isolation='thread', or a cluster of processes."
            )
        dask.config.set({"scheduler-address": address})  # for a `Client()` of the user's own
        try:
            return Client(
                address,
                security=security,
                timeout=self._connect_timeout_s,
                set_as_default=default_client() is None,
                name="daskserve-child",
            )
        except OSError as error:
            raise ClusterUnreachableError(
                f"The Dask scheduler at {address} did not answer: {error}"
            ) from error

    def close(self) -> None:
        """End the connection, if there is one."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            link = link_of(client)
            link.sync(link.close())
            client.close()


# ---- the child's side


class Served(Protocol):
    """What a child does."""

    async def dispatch(
        self, name: str, number: int, envelope: Envelope, receive: Receive, send: Send
    ) -> Load:
        """Answer one stream: a `ChildProcess.call` or a `ChildProcess.request`."""


def prepare(options: Mapping[str, Any]) -> Callable[[socket.socket, int], None]:
    """Import what the child is to do; return what does it, given the socket and the lifeline."""
    module, _, name = options["factory"].partition(":")
    return partial(_run, getattr(importlib.import_module(module), name))


def _run(factory: Callable[[], Served], pair: socket.socket, lifeline: int) -> None:
    _end_with_parent(lifeline)
    with contextlib.suppress(Exception):  # what it raises if there is no stderr
        faulthandler.enable()  # after a crash in native code, the worker's log then says where it was
    switch_interval_s = settings.process().switch_interval_s
    if switch_interval_s is not None:
        sys.setswitchinterval(switch_interval_s)  # as its worker does, lest user code hold up the channel
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(factory, pair))
    # Taking the interpreter down would take a tenth of a second more, and wait for threads of user code.
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # one that is missing, closed or full
            stream.flush()
    os._exit(0)


async def _serve(factory: Callable[[], Served], pair: socket.socket) -> None:
    transport = SocketTransport(pair, f"parent://{os.getppid()}")
    await Channel(transport, factory().dispatch, first_stream=1).serve()


def _end_with_parent(lifeline: int) -> None:
    group, parent = os.getpgrp(), os.getppid()
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
        # Nobody handles the signal that comes of it, SIGIO, so it ends the process, whatever that is doing.
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)

    poll = select.poll()
    poll.register(lifeline)

    def wait() -> None:
        while not poll.poll(PARENT_CHECK_S * 1000) and os.getppid() == parent:
            pass
        os.killpg(group, signal.SIGKILL)

    threading.Thread(target=wait, name="daskserve-lifeline", daemon=True).start()
