"""Runs an API of LitServe on a free port, and prints its address once it answers."""

from __future__ import annotations

import threading
from typing import Any

import litserve
from starting import free_port, wait_until_it_answers


def serve(api: Any, path: str = "", workers: int = 1) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def announce() -> None:
        wait_until_it_answers(f"{url}/health")
        print(url + path, flush=True)

    threading.Thread(target=announce, daemon=True).start()
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=workers)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="error")
