"""Dask processes, programs and HTTP requests for the integration tests, and a check for leftovers."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from distributed import Client, Scheduler

HERE = Path(__file__).parent

#: Default timeout of waits.
PATIENCE_S = 40.0


def poll_for(
    condition: Callable[[], Any], timeout_s: float = PATIENCE_S, *, what: Any = "", every_s: float = 0.01
) -> Any:
    """Return the condition's first true value; fail with ``what`` (or its result, if callable) otherwise."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            text = what() if callable(what) else what
            raise AssertionError(f"not within {timeout_s:g} s: {text or condition}")
        time.sleep(every_s)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer."""
    started = time.monotonic()
    yield
    taken = time.monotonic() - started
    assert taken < seconds, f"took {taken:.1f} s"


@contextmanager
def listener(*, shares_port: bool = False) -> Iterator[int]:
    """Yield a port that accepts connections and never answers."""
    with socket.socket() as sock:
        if shares_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


# ---- HTTP


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def fetch(
    url: str,
    method: str = "GET",
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> Reply:
    """Return the answer to one HTTP request on a new connection, whatever its status."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        target = parts.path or "/"
        connection.request(
            method, f"{target}?{parts.query}" if parts.query else target, body, dict(headers or {})
        )
        answer = connection.getresponse()
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def is_listening(url: str) -> bool:
    try:
        fetch(f"{url}/-/routes", timeout_s=5)
    except (OSError, http.client.HTTPException):
        return False
    return True


# ---- processes


class Program:
    """A Python program in its own process group, with its output in files."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        stdin: str | None = None,
        keeps_stdin: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._out, self._err = folder / f"{id(self):x}.out", folder / f"{id(self):x}.err"
        paths = [str(HERE), str(HERE.parent / "integration"), os.environ.get("PYTHONPATH", "")]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(environment or {})}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE if keeps_stdin or stdin is not None else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=variables,
                cwd=folder,
                start_new_session=True,
            )
        if stdin is not None:
            assert self.process.stdin is not None
            self.process.stdin.write(stdin.encode())
            self.process.stdin.close()

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def errors(self) -> str:
        return self._err.read_text()

    def report(self) -> str:
        """Return the program's status and all of its output, for messages."""
        return f"status {self.process.poll()}, output:\n{self.output}\nerrors:\n{self.errors}"

    def wait_for_line(self, start: str, timeout_s: float = PATIENCE_S) -> str:
        """Wait for a line that starts with ``start`` and return the rest of it."""

        def find() -> list[str]:
            lines = self.output.splitlines(keepends=True)
            found = [each for each in lines if each.startswith(start) and each.endswith("\n")]
            assert found or self.process.poll() is None, self.report()
            return found

        line: str = poll_for(find, timeout_s, what=self.report)[0]
        return line.removeprefix(start).strip()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        try:
            status = self.process.wait(timeout_s)
            if self.process.stdin is not None:
                self.process.stdin.close()
            return status
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the program did not end within {timeout_s:g} s: {self.report()}") from None

    def write_line(self, line: str) -> None:
        """Write a line to the program's standard input, which must have been kept open."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def interrupt(self) -> None:
        """Send SIGINT to the process group, as Ctrl-C in a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        if self.process.poll() is None:
            for each in (*self.descendants(), self.process):
                try:
                    each.kill()
                except psutil.NoSuchProcess:
                    pass
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run; a zombie has ended."""
    found = []
    for each in processes:
        try:
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until_gone(processes: Sequence[psutil.Process], timeout_s: float) -> None:
    """Wait until the processes have ended; kill those that do not end in time, and fail."""
    try:
        poll_for(
            lambda: not alive(processes),
            timeout_s,
            what=lambda: f"still there: {[each.cmdline()[:4] for each in alive(processes)]}",
        )
    finally:
        for each in alive(processes):
            each.kill()


# ---- Dask clusters


#: Ends the process with the test run, even if the run is killed: standard input then closes.
_END_WITH_PARENT = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
"""


def dask_command(kind: str, *arguments: str, prelude: str = "") -> list[str]:
    """Return the arguments of ``python`` that run ``prelude`` and start a scheduler or worker."""
    source = f"{_END_WITH_PARENT}\n{prelude}\nfrom distributed.cli.dask_{kind} import main\nmain()"
    return ["-c", source, *arguments]


@contextmanager
def dask_worker(
    address: str,
    folder: Path,
    *,
    threads: int = 2,
    prelude: str = "",
    name: str = "",
    extra: Sequence[str] = (),
) -> Iterator[Program]:
    """Run a worker process; it is killed at the end."""
    arguments = [address, "--no-nanny", "--no-dashboard", "--host", "127.0.0.1", "--nthreads", str(threads)]
    if name:
        arguments += ["--name", name]
    arguments += extra
    program = Program(dask_command("worker", *arguments, prelude=prelude), folder, keeps_stdin=True)
    try:
        yield program
    finally:
        program.kill()


@contextmanager
def dask_scheduler(folder: Path, *, prelude: str = "", extra: Sequence[str] = ()) -> Iterator[str]:
    """Run a scheduler process and yield its address; it is killed at the end."""
    file = folder / f"scheduler-{time.monotonic_ns()}.json"
    arguments = ["--no-dashboard", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file)]
    arguments += extra
    program = Program(dask_command("scheduler", *arguments, prelude=prelude), folder, keeps_stdin=True)

    def read_address() -> str | None:
        assert program.process.poll() is None, program.report()
        try:
            return str(json.loads(file.read_text())["address"])
        except (OSError, ValueError):
            return None

    try:
        yield poll_for(read_address, what=program.report)
    finally:
        program.kill()


def look(dask_worker: Any) -> dict[str, list[str]]:
    """Return the traces of daskserve in a scheduler or worker process.

    The Dask client runs this function there, with the scheduler or worker as the argument.
    """
    server = dask_worker
    # The tasks of a channel's requests have no names.
    tasks = {task: getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()}
    task_names = [
        "daskserve-channel-handle" if code == "Channel._handle" else task.get_name()
        for task, code in tasks.items()
    ]
    found = {
        "handlers": [name for name in server.handlers if "daskserve" in name],
        "threads": [each.name for each in threading.enumerate() if "daskserve" in each.name],
        "asyncio tasks": [name for name in task_names if "daskserve" in name],
        "listens": sorted(
            f"port {each.laddr.port}"
            for each in psutil.Process().net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        ),
    }
    found["connections"] = [op for op in server._comms.values() if op and op.startswith("daskserve")]
    found["plugins"] = [name for name in server.plugins if "daskserve" in name]
    if isinstance(server, Scheduler):
        found["topics"] = [name for name in server._broker._topics if name.startswith("daskserve")]
        found["keys"] = [str(key) for key in server.tasks if str(key).startswith("daskserve")]
        found["clients"] = [name for name in server.clients if name.startswith("daskserve")]
    else:
        found["actors"] = [str(key) for key in server.state.actors]
        found["keys"] = [str(key) for key in server.state.tasks if str(key).startswith("daskserve")]
    return found


@dataclass
class ExternalCluster:
    """A scheduler and two workers with two threads each, which daskserve did not start."""

    address: str
    client: Client
    folder: Path
    _before: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._before = self._look()

    def _look(self) -> dict[str, dict[str, list[str]]]:
        found = {"scheduler": self.client.run_on_scheduler(look)}
        found.update(self.client.run(look))
        return found

    def leftovers(self) -> list[str]:
        """Return the traces that were not there before the first instance."""
        return [
            f"{place}: {kind} {name}"
            for place, kinds in self._look().items()
            for kind, names in kinds.items()
            for name in names
            if name not in self._before.get(place, {}).get(kind, ())
            # The ports that belong to a worker that joined later are unknown.
            and (place in self._before or kind != "listens")
        ]

    def assert_clean(self, timeout_s: float = 5.0, *, topics: bool = True) -> None:
        """Fail unless all traces of daskserve disappear within ``timeout_s``.

        A topic may exist for one more second: the scheduler removes it once its listeners have unsubscribed.
        """

        def left() -> list[str]:
            return [each for each in self.leftovers() if topics or ": topics " not in each]

        poll_for(lambda: not left(), timeout_s, what=lambda: "left: " + "; ".join(left()), every_s=0.05)

    def sweep(self) -> None:
        """End every instance that is left."""
        # Imported here, because schedulers and workers without daskserve import this module too.
        from daskserve.client.instance.shutdown import abandon_instance
        from daskserve.cluster.dask.connection import connection_of
        from daskserve.errors import NotRunningError

        connection = connection_of(self.client)
        with suppress(NotRunningError):
            for instance in connection.sync(connection.ask("instances"), timeout_s=PATIENCE_S):
                abandon_instance(connection, instance)

    def run_program(self, source: str, *arguments: str, **variables: str) -> Program:
        """Start a Python program; ``sys.argv[1]`` is the scheduler's address."""
        command = ["-c", source, self.address, *arguments]
        return Program(command, self.folder, keeps_stdin=True, environment=variables)
