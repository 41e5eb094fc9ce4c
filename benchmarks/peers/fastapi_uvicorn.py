"""FastAPI on uvicorn with uvicorn's worker processes."""

from __future__ import annotations

from fastapi import FastAPI
from starting import run

WORKERS = "2"
app = FastAPI()


@app.get("/")
async def answer() -> str:
    return "ok"


if __name__ == "__main__":
    options = ["--workers", WORKERS, "--no-access-log", "--log-level", "error"]
    run(["uvicorn", "fastapi_uvicorn:app", *options], "/", "/", settle_s=2.0)
