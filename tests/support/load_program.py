"""GET requests over keep-alive connections from a separate process, until standard input is closed.

Run as ``python load_program.py HOST PORT PATH CONNECTIONS``. Every 20 ms it prints a line of JSON with the
number of answers and the failures since the previous line. The client is strict: it reopens a connection that
the server has announced to close, or has closed before the next request was sent. Any sent request without an
answer of status 200 is a failure.
"""

from __future__ import annotations

import asyncio
import json
import sys

#: Pause of a connection after each answer, so that the load does not saturate the machine.
REST_S = 0.005
TIMEOUT_S = 15.0


class Load:
    def __init__(self, host: str, port: int, path: str) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self.is_over = False
        self._address = host, port
        self._request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()

    async def run(self) -> None:
        """Send one request after another."""
        connection = None
        while not self.is_over:
            try:
                if connection is None:
                    connection = await asyncio.wait_for(asyncio.open_connection(*self._address), TIMEOUT_S)
                is_kept = await asyncio.wait_for(self._ask(*connection), TIMEOUT_S)
            except (OSError, EOFError, ValueError, LookupError, asyncio.LimitOverrunError) as error:
                self.failures.append(repr(error))
                is_kept = False
                await asyncio.sleep(0.05)
            if connection is not None and not is_kept:
                connection[1].close()
                connection = None
            await asyncio.sleep(REST_S)
            if connection is not None and connection[0].at_eof():
                connection[1].close()
                connection = None

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send a request, read its answer, and return whether the connection may be reused."""
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        lines = head.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(headers["content-length"]))
        if lines[0].split(" ")[1] == "200":
            self.answered += 1
        else:
            self.failures.append(f"{lines[0]} {body[:100]!r}")
        return headers.get("connection") != "close"

    async def report(self) -> None:
        while True:
            answered, self.answered = self.answered, 0
            failures, self.failures = self.failures, []
            print_progress(answered, failures)
            await asyncio.sleep(0.02)


def print_progress(answered: int, failures: list[str]) -> None:
    sys.stdout.write(json.dumps([answered, failures]) + "\n")
    sys.stdout.flush()


async def main(host: str, port: str, path: str, connections: str) -> None:
    load = Load(host, int(port), path)
    reporting = asyncio.create_task(load.report())
    running = [asyncio.create_task(load.run()) for _ in range(int(connections))]
    await asyncio.to_thread(sys.stdin.read)
    load.is_over = True
    await asyncio.gather(*running)
    reporting.cancel()
    print_progress(load.answered, load.failures)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
