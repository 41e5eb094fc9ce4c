"""Runs an API of LitServe on a free port, and prints its address once it answers."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from typing import Any

import litserve


def serve(api: Any, path: str = "", workers: int = 1) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def announce() -> None:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                time.sleep(0.2)
        print(url + path, flush=True)

    threading.Thread(target=announce, daemon=True).start()
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=workers)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="error")
