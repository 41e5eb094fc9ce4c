"""BentoML with two workers; it accepts only POST, on the path /answer."""

from __future__ import annotations

import bentoml
from starting import run


@bentoml.service(workers=2, metrics={"enabled": False}, logging={"access": {"enabled": False}})
class Answer:
    @bentoml.api
    async def answer(self, a: int) -> str:
        return "ok"


if __name__ == "__main__":
    run(["bentoml", "serve", "bentoml_noop:Answer", "--quiet"], "/answer", "/readyz")
