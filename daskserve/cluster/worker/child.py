"""Child processes: another Python interpreter that does a part of this process's work and communicates over
one channel.

Problem: some code must not share this process's memory, interpreter lock or packages. Choice: a plain
subprocess of the given interpreter. It inherits one end of a socket pair. A
`daskserve.cluster.channel.channel.Channel` runs over the pair, as between workers, so no port is open and no
other process can connect. An import path names the code that the child runs, because this layer may not
import the layers above it. A start works as follows::

    parent                                   child
      spawn, one line of options  ------->     first statements of `_BOOT`
                                  <-------     one line of facts: Python, daskserve, what went wrong
      channel                     <------>     `Channel` over the same socket

`_BOOT` runs under any Python 3 and needs no package, so that an unsuitable interpreter can report why.

A child leads its own process group, and the whole group ends with it: processes that user code started must
not outlive it, or keep its end of the socket open. A child ends with its parent through the *lifeline*, a
pipe to which no process writes: it reaches end-of-file when the parent is gone. A thread of the child waits
for this. On Linux the kernel also sends a signal, because a thread cannot run while native code holds the
interpreter's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from daskserve._version import __version__
from daskserve.cluster.actors import recent_log
from daskserve.cluster.actors.calls import control_call
from daskserve.cluster.channel.channel import Channel, Dispatch
from daskserve.cluster.channel.wire.segments import Segments
from daskserve.cluster.channel.wire.transport import SocketTransport, Transport
from daskserve.cluster.dask.connection import DaskConnection
from daskserve.cluster.distributed_internals import scheduler_address
from daskserve.cluster.probe import can_mix
from daskserve.cluster.protocols.base import Process
from daskserve.cluster.worker.child_view import FACTS, ClusterAccess
from daskserve.cluster.worker.stack_dump import ask_for_stacks, crash_in, process_state
from daskserve.common import settings
from daskserve.common.types import ActorAddress, ActorRequest, Envelope, Payload
from daskserve.errors import InstanceError, VersionMismatchError
from daskserve.options.environment import Interpreter
from daskserve.payload.pickling import dump_bytes

logger = logging.getLogger("daskserve.child")

#: Time before a child is killed after its connection was closed or lost.
EXIT_GRACE_S = 0.5
#: Maximum time for reading the data that a dead child had sent.
FLUSH_S = 0.5
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
sys.path[:0] = options["first"]
facts = {"python": "%d.%d" % sys.version_info[:2], "version": None, "protocol": None, "detail": ""}
main = None
try:
    from daskserve import _version
    facts["version"] = _version.__version__
    facts["protocol"] = getattr(_version, "PROTOCOL", None)
    from daskserve.cluster.worker.child_main import prepare
    main = prepare(options)
except BaseException as error:
    facts["detail"] = "%s: %s" % (type(error).__name__, error)
pair.sendall((json.dumps(facts) + "\\n").encode())
if main is not None: main(pair, int(sys.argv[2]))
"""


# ---- the parent's side


class _Process(asyncio.SubprocessProtocol):
    """A process whose exit is a future that does not end with the tasks of its event loop."""

    _transport: asyncio.SubprocessTransport

    def __init__(self) -> None:
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def process_exited(self) -> None:
        self._transport.close()
        if not self.exited.done():
            self.exited.set_result(None)

    @property
    def pid(self) -> int:
        return self._transport.get_pid()

    @property
    def returncode(self) -> int | None:
        return self._transport.get_returncode()


async def _finish(future: asyncio.Future[Any]) -> None:
    """Wait for a future that ends soon, and only then raise a cancellation of this task."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class ChildProcess:
    """A running child, created with `start`. `ended` is set when the process has exited for any reason."""

    def __init__(
        self,
        name: str,
        process: _Process,
        transport: Transport,
        lifeline: int,
        log: int,
        dump: int,
        sockets: socket.socket,
        dispatch: Dispatch,
    ) -> None:
        self.name = name
        self._sockets = sockets
        self._dump = dump
        #: The descriptor of the file to which the child logs; None once it has ended.
        self.log_file: int | None = log
        self._last_lines: tuple[str, ...] = ()
        self.ended = asyncio.Event()
        #: Called once, on this loop, when the process has ended.
        self.on_end: Callable[[], None] | None = None
        #: Called with the descriptor of the file to which the process has logged, before the file is closed.
        self.on_log_end: Callable[[int], object] | None = None
        #: The stacks that the process wrote when it crashed in native code; valid once `ended` is set.
        self.crash = ""
        self._process = process
        self._lifeline = lifeline
        self._segments = Segments()
        transport.share(self._segments, begins=True)
        self._channel = Channel(transport, dispatch, first_stream=0)
        self._serving = asyncio.create_task(self._channel.serve(), name=f"daskserve-child-{name}")
        self._watching = asyncio.create_task(self._watch(), name=f"daskserve-child-watch-{name}")

    def __repr__(self) -> str:
        state = self.exit_reason if self.ended.is_set() else "running"
        return f"<ChildProcess {self.name} pid={self.pid} {state}>"

    @classmethod
    async def start(
        cls, name: str, interpreter: Interpreter, factory: str, dispatch: Dispatch | None = None
    ) -> ChildProcess:
        """Start an interpreter that serves this process by a factory, and return the child.

        Parameters
        ----------
        name : str
            Name in the process list.
        factory : str
            ``"package.module:name"`` of a `daskserve.cluster.worker.child_main.Factory`; imported in the
            child.
        dispatch : callable, optional
            Takes the requests of the child; without it, they fail.

        Raises
        ------
        VersionMismatchError
            The interpreter has no daskserve, or another version of daskserve or Python.
        InstanceError
            The interpreter cannot be run, or exited before it reported its versions.
        """
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as handed_over:
            log = recent_log.open_file()
            kept.callback(os.close, log)
            dump = recent_log.open_file()
            kept.callback(os.close, dump)
            ours, theirs = socket.socketpair()
            kept.enter_context(ours)
            handed_over.enter_context(theirs)
            sockets, theirs_of_sockets = socket.socketpair(type=socket.SOCK_DGRAM)
            kept.enter_context(sockets)
            handed_over.enter_context(theirs_of_sockets)
            lifeline_end, lifeline = os.pipe()
            kept.callback(os.close, lifeline)
            handed_over.callback(os.close, lifeline_end)
            files = (log, dump, theirs_of_sockets.fileno())
            spawning = asyncio.ensure_future(_spawn(interpreter, name, theirs.fileno(), lifeline_end, files))
            try:
                await _finish(spawning)
                handed_over.close()
                process = spawning.result()
                facts = await _greet(ours, interpreter, factory, files)
                if facts is None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(asyncio.shield(process.exited), EXIT_GRACE_S)
                    raise InstanceError(
                        f"The interpreter {interpreter.python} did not start: it "
                        f"{exit_reason_of(process.returncode)}. The log of its worker contains its output."
                    )
                problem = _mismatch(interpreter, facts)
                if problem is not None:
                    raise VersionMismatchError(problem)
            except BaseException:
                if not spawning.cancelled() and spawning.exception() is None:
                    process = spawning.result()
                    _kill_group(process.pid)
                    await _finish(process.exited)
                raise
            kept.pop_all()  # from here on, the `ChildProcess` closes them
        transport = SocketTransport(ours, f"child://{name}")
        return cls(name, process, transport, lifeline, log, dump, sockets, dispatch or _refuse)

    @property
    def pid(self) -> int:
        """The process's id, which is also that of its group."""
        return self._process.pid

    @property
    def is_open(self) -> bool:
        """Whether the connection to the child is open."""
        return not self._channel.is_closed

    @property
    def exit_reason(self) -> str:
        """How the process ended, as a verb phrase; valid once `ended` is set."""
        return exit_reason_of(self._process.returncode)

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines that the child's code has logged, also after its end."""
        return self._last_lines if self.log_file is None else recent_log.read_file(self.log_file)

    async def stacks(self) -> str:
        """Return the stacks of the process's threads, even of a blocked one; empty without signals."""
        return "" if self.ended.is_set() else await ask_for_stacks(self.pid, self._dump)

    def state(self) -> str:
        """Return the state of the process according to the operating system."""
        return process_state(self.pid)

    def request(self, number: int, envelope: Envelope) -> ActorRequest:
        """Return a request to the child; see `daskserve.cluster.channel.channel.Channel.request`.

        The number reaches the child's ``dispatch`` unchanged: it identifies the request even after its end.
        """
        address = ActorAddress(self.name, f"process {self.pid}", number)
        return self._channel.request(address, envelope)

    async def call(self, verb: str, payload: Payload | None = None, **message: Any) -> Any:
        """Call a verb of the child with plain values and, optionally, bytes and buffers of any size."""
        return await control_call(partial(self.request, 0), verb, message, payload)

    def hand_over(self, name: str, files: Sequence[int]) -> None:
        """Send the child file descriptors; `Parent.take_files` returns them by name.

        Raises
        ------
        OSError
            The child has ended.
        """
        socket.send_fds(self._sockets, [name.encode()], list(files), socket.MSG_DONTWAIT)

    async def end(self) -> None:
        """Close the connection so that the process exits, kill it if it does not, and wait for its end."""
        self._channel.close()
        await self.ended.wait()

    def kill(self) -> None:
        """Kill the process and its process group; `ended` is set soon afterwards."""
        _kill_group(self.pid)

    def _read_last(self) -> None:
        """Read the last logs and the crash report of the process, and close its files."""
        self.crash = crash_in(self._dump)
        os.close(self._dump)
        log, self.log_file = self.log_file, None
        if log is None:
            return
        # The first lines of a stack show where the crash happened.
        crash = self.crash.splitlines()[: recent_log.LINES // 2]
        self._last_lines = (*recent_log.read_file(log), *crash)[-recent_log.LINES :]
        if self.on_log_end is not None:
            self.on_log_end(log)
        os.close(log)

    async def _watch(self) -> None:
        exiting = self._process.exited
        try:
            await asyncio.wait({exiting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
            if not exiting.done():
                # A child without its channel is useless: it is exiting, or will be killed.
                await asyncio.wait({exiting}, timeout=EXIT_GRACE_S)
            self.kill()
            await asyncio.wait({exiting})
            await asyncio.wait({self._serving}, timeout=FLUSH_S)
            self._channel.close()
            await asyncio.wait({self._serving})
        except asyncio.CancelledError:
            # The event loop is closing and waits for its tasks, one of which may wait for `ended`.
            if self._process.returncode is None:
                self.kill()
                await _finish(exiting)
            self._channel.close()
            raise
        finally:
            os.close(self._lifeline)
            self._sockets.close()
            self._read_last()
            self._segments.close()
            self.ended.set()
        if self.on_end is not None:
            self.on_end()


async def _spawn(
    interpreter: Interpreter, name: str, pair: int, lifeline: int, files: tuple[int, int, int]
) -> _Process:
    try:
        _, process = await asyncio.get_running_loop().subprocess_exec(
            _Process,
            *(interpreter.python, "-c", _BOOT, str(pair), str(lifeline), name),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=None,
            stderr=None,
            pass_fds=(pair, lifeline, *files),
            start_new_session=True,
            env=interpreter.variables,
        )
    except OSError as error:
        raise InstanceError(f"The interpreter {interpreter.python} cannot be run: {error}") from error
    return process


async def _greet(
    pair: socket.socket, interpreter: Interpreter, factory: str, files: tuple[int, int, int]
) -> dict[str, Any] | None:
    """Send the child its options and return its facts; None if it sends none."""
    loop = asyncio.get_running_loop()
    pair.setblocking(False)
    # Another interpreter has different packages, so this process's import path must not be used there.
    path = [entry or os.getcwd() for entry in sys.path] if interpreter.is_own else None
    line = b""
    try:
        options = {
            "path": path,
            "first": list(interpreter.first),
            "factory": factory,
            "settings": asdict(settings.process()),
            "metrics": asdict(settings.metrics()),
            "log": files[0],
            "dump": files[1],
            "sockets": files[2],
        }
        await loop.sock_sendall(pair, json.dumps(options).encode() + b"\n")
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
    """Return an error text about an unsuitable interpreter, with the remedy; None if it is suitable."""
    who = f"The interpreter {interpreter.python} (Python {facts['python']})"
    remedy = f"{interpreter.python} -m pip install daskserve=={__version__}"
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if facts["python"] != here:
        return (
            f"{who} cannot run a replica of this worker, which runs Python {here}: user code cannot travel "
            f"between different Python versions. Create the environment with Python {here}."
        )
    if facts["version"] is None:
        return f"{who} has no daskserve ({facts['detail']}); install it there: {remedy}"
    if not can_mix(facts["version"], facts["protocol"]):
        return (
            f"{who} has daskserve {facts['version']} but its worker has {__version__}; install the same "
            f"version there: {remedy}"
        )
    if facts["detail"]:
        return f"{who} cannot load daskserve {__version__} ({facts['detail']}); reinstall it: {remedy}"
    return None


def exit_reason_of(status: int | None) -> str:
    """Return how a process ended, as a verb phrase."""
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


def _refuse(name: str, number: int, envelope: Envelope) -> ActorRequest:
    raise InstanceError("A child process cannot send requests to its parent.")


def dump_access(cluster: Process) -> bytes:
    """Return the pickled `ClusterAccess` for a child."""
    connection, timeout_s = cluster.connection, settings.timeouts().connect_s
    address = scheduler_address(connection.client) if isinstance(connection, DaskConnection) else None
    if not isinstance(connection, DaskConnection) or address is None or address.startswith("inproc"):
        return dump_bytes(ClusterAccess(timeout_s=timeout_s))
    facts = {} if connection.worker is None else {name: getattr(connection.worker, name) for name in FACTS}
    return dump_bytes(ClusterAccess(address, dump_bytes(connection.client.security), facts, timeout_s))
