"""Runs a peer that is a separate command, on a free port, until SIGTERM, and prints its address."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until_it_answers(url: str) -> None:
    while True:
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.2)


def run(arguments: Sequence[str], path: str, ready_path: str, settle_s: float = 0.0) -> None:
    """Run a Python module with its arguments in this folder; ``--port`` is added.

    Parameters
    ----------
    path, ready_path : str
        What is measured, and what answers once the server has started.
    settle_s : float
        How long other processes of it may take to start after that.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    port = free_port()
    command = [sys.executable, "-m", *arguments, "--port", str(port)]
    process = subprocess.Popen(command, cwd=os.path.dirname(os.path.abspath(__file__)))
    try:
        wait_until_it_answers(f"http://127.0.0.1:{port}{ready_path}")
        time.sleep(settle_s)
        print(f"http://127.0.0.1:{port}{path}", flush=True)
        process.wait()
    finally:
        process.terminate()
        process.wait()
