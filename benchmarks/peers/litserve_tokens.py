"""LitServe, which streams tokens in fixed batches of 8: for ``bench_tokens.py``."""

import sys
import time
from collections.abc import Iterator
from typing import Any

import litserve
from litserve_server import serve
from starlette.requests import Request

SLOTS, WAIT_S = 8, 0.01


# No postponed annotations here: LitServe could not resolve them.
class Writer(litserve.LitAPI):
    """Makes a token for each text of a batch, step by step."""

    def setup(self, device: str) -> None: ...

    def decode_request(self, request: Request) -> int:
        return int(request["count"])

    def batch(self, inputs: list[int]) -> list[int]:
        return inputs

    def predict(self, counts: list[int]) -> Iterator[list[str]]:
        for number in range(max(counts)):
            time.sleep(float(sys.argv[1]))
            yield ["data: token\n\n" if number < count else "" for count in counts]

    def unbatch(self, output: Iterator[list[str]]) -> Iterator[list[str]]:
        yield from output

    def encode_response(self, outputs: Iterator[list[str]]) -> Any:
        yield from outputs


if __name__ == "__main__":
    serve(Writer(max_batch_size=SLOTS, batch_timeout=WAIT_S, stream=True), "/predict")
