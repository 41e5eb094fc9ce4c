"""The HTTP server of a scheduler returns the address of the scheduler."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tables import each_case

from daskserve.client.functions.scheduler_address import scheduler_behind
from daskserve.cluster.dask.connection import dial
from daskserve.errors import ClusterUnreachableError

SCHEDULER = {"type": "Scheduler", "address": "tcp://10.0.0.7:8786"}


@contextmanager
def server(answers: dict[str, str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(answers.get(self.path, "").encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


async def test_a_server_that_never_answers_is_no_scheduler() -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    listener = await asyncio.start_server(wait, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    with pytest.raises(ClusterUnreachableError, match=r"did not answer in Dask's protocol within 0.1 s"):
        await dial(address, 0.1, asynchronous=True)
    async with asyncio.timeout(10):
        await ended.wait()  # otherwise the connection outlives its event loop
    listener.close()


@each_case(
    ("prefix", "path"),
    [
        ("", ""),
        ("", "/"),
        ("", "/status"),
        ("", "/status?theme=dark#top"),
        ("/dask", "/dask/info/main/x.html"),
    ],
)
def test_the_root_a_page_and_a_prefix_lead_to_the_scheduler(prefix: str, path: str) -> None:
    with server({f"{prefix}/json/identity.json": json.dumps(SCHEDULER)}) as url:
        assert scheduler_behind(f"{url}{path}", 5) == "tcp://10.0.0.7:8786"


@each_case(
    ("answer", "reason"),
    [
        (None, "it answers with 404 Not Found"),
        ("<html>Log in</html>", "it is not the HTTP server of a scheduler"),
        ('{"type": "Worker", "address": "tcp://10.0.0.7:1"}', "it is not the HTTP server of a scheduler"),
        ("[1]", "it is not the HTTP server of a scheduler"),
    ],
)
def test_another_server_is_named_with_its_answer(answer: str | None, reason: str) -> None:
    answers = {} if answer is None else {"/json/identity.json": answer}
    with server(answers) as url, pytest.raises(ClusterUnreachableError) as caught:
        scheduler_behind(f"{url}/status", 5)
    assert f"No Dask scheduler answers at '{url}/status' ({reason})" in str(caught.value)
    assert "http://host:8787" in str(caught.value)
