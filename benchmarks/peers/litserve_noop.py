"""LitServe with two workers; it accepts only POST, on the path /predict."""

from typing import Any

import litserve
from litserve_server import serve
from starlette.requests import Request


# No postponed annotations here: LitServe could not resolve them.
class Answer(litserve.LitAPI):
    def setup(self, device: str) -> None: ...

    def decode_request(self, request: Request) -> Any:
        return request

    def predict(self, x: Any) -> str:
        return "ok"

    def encode_response(self, output: str) -> str:
        return output


if __name__ == "__main__":
    serve(Answer(), "/predict", workers=2)
