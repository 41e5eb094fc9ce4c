"""The application of ``bench_kills.py``: it answers with the id of its process."""

from __future__ import annotations

import asyncio
import os

from fastapi import FastAPI

app = FastAPI()


@app.get("/pid")
async def pid() -> int:
    await asyncio.sleep(0.02)
    return os.getpid()
