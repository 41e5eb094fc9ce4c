"""A headless chromium, driven by the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dask_processes import fetch
from tornado.websocket import WebSocketClientConnection, websocket_connect

#: Whether tests of pages can run.
HAS_CHROMIUM = shutil.which("chromium") is not None
#: Timeout of waits for a condition.
PATIENCE_S = 30.0


class Tab:
    """One page of a browser.

    Attributes
    ----------
    troubles : list
        The errors on the console, and the uncaught exceptions.
    """

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.troubles: list[str] = []
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while (text := await self._socket.read_message()) is not None:
            message = json.loads(text)
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            elif message["method"] == "Runtime.exceptionThrown":
                self.troubles.append(json.dumps(message["params"]["exceptionDetails"])[:1000])
            elif message["method"] == "Log.entryAdded":
                entry = message["params"]["entry"]
                if entry["level"] == "error" and entry["source"] != "network":
                    self.troubles.append(f"{entry['text']} {entry.get('url', '')}")

    async def ended(self) -> None:
        """Return once the connection is closed."""
        await self._reading

    async def send(self, method: str, **params: Any) -> Any:
        """Return the result of a method of the protocol."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.write_message(json.dumps({"id": self._number, "method": method, "params": params}))
        async with asyncio.timeout(PATIENCE_S):
            message = await answer
        assert "error" not in message, (method, message)
        return message["result"]

    async def open(self, url: str) -> None:
        """Go to a page."""
        await self.send("Page.navigate", url=url)

    async def _evaluate(self, expression: str) -> Any:
        return await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )

    async def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        result = await self._evaluate(expression)
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    async def until(self, expression: str, timeout_s: float = PATIENCE_S) -> Any:
        """Return the value of an expression once it is true; until then, the expression may also raise."""
        found = None
        try:
            async with asyncio.timeout(timeout_s):
                while not found:
                    result = await self._evaluate(expression)
                    found = "exceptionDetails" not in result and result["result"].get("value")
                    await asyncio.sleep(0.0 if found else 0.03)
        except TimeoutError:
            text = await self.ask("document.body.innerText")
            raise AssertionError(f"{expression} is not true; the page has: {text}; {self.troubles}") from None
        return found

    async def press(self, key: str) -> None:
        """Press a key."""
        code = {"Enter": 13, "Escape": 27, "End": 35}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    async def resize(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Set the size of the window, and the theme of the system."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[theme])

    async def photograph(self) -> bytes:
        """Return a screenshot of the window as PNG."""
        return base64.b64decode((await self.send("Page.captureScreenshot"))["data"])


@asynccontextmanager
async def chromium() -> AsyncIterator[Tab]:
    """Run a browser with an empty page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [
            "chromium",
            *("--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", "--no-first-run"),
            *("--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={folder}"),
            "about:blank",
        ]
        browser = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        try:
            assert browser.stderr is not None
            async with asyncio.timeout(PATIENCE_S):
                while b"DevTools listening" not in (line := await browser.stderr.readline()):
                    assert line, "chromium ended"
            address = line.split()[-1].decode().removeprefix("ws://").partition("/")[0]
            pages = json.loads(fetch(f"http://{address}/json").text)
            found = next(each for each in pages if each["type"] == "page")
            socket = await websocket_connect(found["webSocketDebuggerUrl"], max_message_size=2**26)
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log"):
                await tab.send(f"{domain}.enable")
            try:
                yield tab
            finally:
                socket.close()
                await tab.ended()
        finally:
            browser.kill()
            await browser.wait()
