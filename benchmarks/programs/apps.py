"""The applications of ``bench_apps.py``: typical ones, with a small model of scikit-learn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import numpy as np
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from pydantic import BaseModel
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from starlette.requests import Request
from starlette.responses import StreamingResponse

import daskserve as serve

EVENTS = 50
BATCH_SIZE, BATCH_WAIT_S = 16, 0.002


@cache
def model() -> LogisticRegression:
    digits = load_digits()
    return LogisticRegression(max_iter=200).fit(digits.data / 16, digits.target)


def classify(images: list[list[float]]) -> list[int]:
    found: list[int] = model().predict(np.asarray(images) / 16).tolist()
    return found


class Image(BaseModel):
    pixels: list[float]


class Item(BaseModel):
    name: str
    description: str
    price: float
    tags: list[str]
    amounts: dict[str, float]


app = FastAPI()


@app.post("/plain")
def plain(image: Image) -> dict[str, int]:
    return {"digit": classify([image.pixels])[0]}


@app.post("/async")
async def on_the_loop(image: Image) -> dict[str, int]:
    return {"digit": classify([image.pixels])[0]}


@app.post("/item")
async def item(item: Item) -> Item:
    return item


@app.get("/events")
async def events() -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        for number in range(EVENTS):
            yield f"data: {number}\n\n"
            await asyncio.sleep(0)

    return StreamingResponse(lines(), media_type="text/event-stream")


@app.websocket("/echo")
async def echo(socket: WebSocket) -> None:
    await socket.accept()
    try:
        while True:
            await socket.send_text(await socket.receive_text())
    except WebSocketDisconnect:
        pass


class AsyncModel:
    """The model of ``/async`` as a class, without FastAPI."""

    async def __call__(self, request: Request) -> dict[str, int]:
        body: dict[str, Any] = await request.json()
        return {"digit": classify([body["pixels"]])[0]}


class BatchedModel:
    """The model for many requests at a time."""

    @serve.batch(max_batch_size=BATCH_SIZE, batch_wait_timeout_s=BATCH_WAIT_S)
    async def classify(self, images: list[list[float]]) -> list[int]:
        return classify(images)

    async def __call__(self, request: Request) -> dict[str, int]:
        body: dict[str, Any] = await request.json()
        return {"digit": await self.classify(body["pixels"])}


class LargerBatches(BatchedModel):
    """The same, in batches that 32 clients of two replicas do not fill."""

    @serve.batch(max_batch_size=2 * BATCH_SIZE, batch_wait_timeout_s=BATCH_WAIT_S)
    async def classify(self, images: list[list[float]]) -> list[int]:
        return classify(images)


model()  # trained before the first request
