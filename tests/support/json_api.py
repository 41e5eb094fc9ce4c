"""A fake HTTP API of another system, such as a broker's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def json_api(answer: Callable[[str, Message], tuple[int, Any]]) -> Iterator[str]:
    """Answer each GET with the status and the JSON that ``answer(path, headers)`` returns; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answer(self.path, self.headers)
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
