"""User code for test_isolation.py, in a separate module because child processes import it.

It communicates with the test by files, which work across processes.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from daskserve import context, metrics
from daskserve.data.replica.requests.accept_batch import accept_batch

PATIENCE_S = 10.0


class Trouble(Exception):
    """An error with a field that its message does not show."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason, code)
        self.code = code


class Folder:
    """The folder in which user code creates files for the test."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def mark(self, name: str) -> None:
        (self.path / name).touch()

    def has(self, name: str) -> bool:
        return (self.path / name).exists()


class Measuring:
    """Records metrics, in a replica or outside of one."""

    def __init__(self) -> None:
        self.calls = metrics.Counter("calls", "Calls.", tag_keys=("kind",))
        self.sizes = metrics.Histogram("sizes", "Sizes.", boundaries=[1.0, 10.0])

    def __call__(self, request: Any) -> int:
        return os.getpid()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"pid": os.getpid(), "bad": float("nan")}

    def fail(self) -> None:
        raise Trouble("what went wrong", 7)

    def count(self, kind: str, size: float) -> int:
        self.calls.inc(tags={"kind": kind})
        self.sizes.observe(size)
        return os.getpid()


class Model:
    """Plain methods and async ones; ``__call__`` answers HTTP and classic calls."""

    def __init__(self, folder: str) -> None:
        self.folder = Folder(folder)
        self.word = "word"
        self.folder.mark(f"made-{os.getpid()}")

    def reconfigure(self, config: Any) -> None:
        if config == "bad":
            raise ValueError("bad config")
        self.word = config

    def check_health(self) -> None:
        if self.word == "ill":
            raise RuntimeError("feverish")

    def __call__(self, request: Any) -> Any:
        ask = request.query_params.get("ask")
        if "hold" in request.query_params:
            return self.hold(request.query_params["hold"])
        if ask == "where":
            return self.where()
        if ask == "fail":
            raise KeyError("secret")
        if ask == "missing":
            raise HTTPException(404, "no such thing")
        if ask == "stream":
            return self._chunks()
        if ask == "length":
            return len(request.body_bytes)
        return self.word

    def _chunks(self) -> Iterator[str]:
        for number in range(40):
            yield f"{number},"

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def where(self) -> list[Any]:
        here, request = context.get_replica_context(), context.current_request.get()
        return [
            here.instance,
            context.get_current_backend_tag(),
            context.get_current_replica_tag(),
            here.servable_object is self,
            "" if request is None else request.request_id,
        ]

    def connect(self) -> None:
        from daskserve.client.functions.discovery import connect

        connect()

    def pid(self) -> int:
        return os.getpid()

    async def pid_async(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise Trouble("what went wrong", 7)

    async def fail_async(self) -> None:
        raise Trouble("what went wrong", 7)

    def hold(self, name: str) -> str:
        """Occupy a slot until the test creates the file ``<name>-go``."""
        self.folder.mark(f"{name}-began")
        deadline = time.monotonic() + PATIENCE_S
        while not self.folder.has(f"{name}-go") and time.monotonic() < deadline:
            time.sleep(0.002)
        return name

    async def hold_async(self, name: str) -> str:
        self.folder.mark(f"{name}-began")
        try:
            while not self.folder.has(f"{name}-go"):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.folder.mark(f"{name}-cancelled")
            raise
        return name

    def __del__(self) -> None:
        self.folder.mark("destructed")


class SlowEnd(Model):
    """A model whose destructor waits for the test."""

    async def __del__(self) -> None:  # type: ignore[override]
        self.folder.mark("ending")
        while not self.folder.has("go"):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        self.folder.mark("destructed")


class Breaker(Model):
    """Ends, crashes or blocks its process."""

    def exit(self, status: int) -> None:
        os._exit(status)

    def answer_and_exit(self) -> str:
        threading.Timer(0.05, os._exit, (0,)).start()
        return "last words" * 1_000

    def crash(self) -> None:
        ctypes.string_at(0)

    def spawn(self) -> int:
        """Start a process that outlives the call, and return its id."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid

    def sleep(self, name: str) -> None:
        self.folder.mark(f"{name}-began")
        time.sleep(60)

    async def block(self, name: str) -> None:
        self.sleep(name)

    def hold_the_lock(self, name: str) -> None:
        """Run native code that does not release the interpreter lock."""
        self.folder.mark(f"{name}-began")
        re.match(r"(a+)+$", "a" * 60 + "b")


class DiesInConstructor:
    def __init__(self, how: str) -> None:
        if how == "crash":
            ctypes.string_at(0)
        if how == "exit":
            os._exit(7)
        raise ZeroDivisionError("in the constructor")

    def __call__(self) -> None: ...


class NeverMade:
    def __init__(self, folder: str) -> None:
        Folder(folder).mark("constructor-began")
        time.sleep(60)

    def __call__(self) -> None: ...


def interpreter(request: Any) -> list[str]:
    return [sys.prefix, os.environ.get("VIRTUAL_ENV", ""), os.environ.get("PYTHONPATH", "")]


@accept_batch
def double(requests: list[Any]) -> list[Any]:
    return [[2 * int(request.query_params["n"]), len(requests)] for request in requests]


async def quick(request: Any) -> str:
    return "quick"


# ---- an ASGI application


async def hello(request: Request) -> PlainTextResponse:
    body = (await request.body()).decode()
    return PlainTextResponse(f"{request.method} {request.path_params['name']} {body}", headers={"x-key": "v"})


async def echo_socket(socket: WebSocket) -> None:
    await socket.accept()
    while True:
        text = await socket.receive_text()
        if text == "end":
            break
        await socket.send_text(text.upper())
    await socket.close(4000)


async def fail_late(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"half", "more_body": True})
    raise Trouble("late", 1)


def make_app() -> Starlette:
    app = Starlette(
        routes=[
            Route("/hello/{name}", hello, methods=["POST"]),
            WebSocketRoute("/echo", echo_socket),
        ]
    )
    app.mount("/late", fail_late)
    return app


APP = make_app()


# ---- the main thread


class MainPlain:
    """Sets a signal handler in its constructor, as servers of models do; has plain methods only."""

    def __init__(self, folder: str) -> None:
        self.folder = Folder(folder)
        self.made_in = threading.current_thread() is threading.main_thread()
        signal.signal(signal.SIGTERM, self._end)
        asyncio.run(asyncio.sleep(0))

    def _end(self, number: int, frame: Any) -> None:
        self.folder.mark("ended")
        raise SystemExit(3)

    def __call__(self, request: Any = None) -> None: ...

    def facts(self) -> list[bool]:
        return [self.made_in, LOADED_IN_MAIN]

    def block(self) -> None:
        self.folder.mark("blocked")
        time.sleep(60)


class MainAsync(MainPlain):
    """Its methods run on an event loop, which can handle signals, too."""

    def __init__(self, folder: str) -> None:
        self.folder = Folder(folder)
        self.made_in = threading.current_thread() is threading.main_thread()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.folder.mark, "signalled")

    async def facts(self) -> list[bool]:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGUSR1)
        while not self.folder.has("signalled"):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return [self.made_in, LOADED_IN_MAIN]


class MainOfWorkersLoop(MainPlain):
    """Its methods run on the loop of the channel, and its constructor does not."""

    async def facts(self) -> list[bool]:  # type: ignore[override]
        return [self.made_in, LOADED_IN_MAIN]


LOADED_IN_MAIN = threading.current_thread() is threading.main_thread()
