"""Programs like those in Ray Serve's documentation and tests, with changed imports.

`ray_files` has the configuration files that name them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, WebSocket
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import StreamingResponse

import daskserve as serve
from daskserve.config import AutoscalingContext, DeploymentActorConfig
from daskserve.handle import DeploymentHandle
from daskserve.request_router import PendingRequest, RequestRouter, RunningReplica


@serve.deployment
def hello(request: Request) -> str:
    """The first program of a tutorial."""
    return "hello"


hello_app = hello.bind()


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0.2, "num_gpus": 0})
class Translator:
    """A model whose language is in its ``user_config``."""

    def __init__(self) -> None:
        self.language = "german"

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Set the language."""
        self.language = config.get("language", "german")

    def translate(self, text: str) -> str:
        """Translate a text."""
        return f"{text} in {self.language}"


@serve.deployment
class Summarizer:
    """The ingress of a chain of two models."""

    def __init__(self, translator: DeploymentHandle) -> None:
        self.translator = translator

    async def __call__(self, request: Request) -> str:
        text: str = await request.json()
        return await self.translator.translate.remote(text[:5])


text_app = Summarizer.bind(Translator.bind())


@serve.deployment(user_config={"factor": 3}, ray_actor_options={"num_cpus": 0.15})
class Multiplier:
    """A node whose factor is in its ``user_config``."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Set the factor."""
        self.factor = config.get("factor", -1)

    def multiply(self, number: int) -> int:
        """Multiply a number."""
        return number * self.factor


@serve.deployment(user_config={"increment": 2}, ray_actor_options={"num_cpus": 0.15})
class Adder:
    """A node whose increment is in its ``user_config``; an environment variable overrides it."""

    def __init__(self, increment: int) -> None:
        self.increment = increment

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Set the increment."""
        self.increment = config.get("increment", -1)

    def add(self, number: int) -> int:
        """Add to a number."""
        return number + int(os.environ.get("OVERRIDE_INCREMENT", self.increment))


@serve.deployment(ray_actor_options={"num_cpus": 0.15})
class Router:
    """The ingress of a graph with two branches."""

    def __init__(self, multiplier: DeploymentHandle, adder: DeploymentHandle) -> None:
        self.multiplier, self.adder = multiplier, adder

    async def __call__(self, request: Request) -> str:
        operation, amount = await request.json()
        if operation == "ADD":
            amount = await self.adder.add.remote(amount)
        else:
            amount = await self.multiplier.multiply.remote(amount)
        return f"{amount} pizzas please!"


pizza_app = Router.bind(Multiplier.bind(1), Adder.bind(1))


class TypedArgs(BaseModel):
    """Arguments of a function that builds an application."""

    message: str = "DEFAULT"


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Echo:
    """Answers with its arguments."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, *args: Any) -> str:
        return self.message


def build_echo(args: dict[str, str]) -> serve.Application:
    """Build an application from the arguments of a file."""
    return Echo.bind(args.get("message", "DEFAULT"))


def build_typed_echo(args: TypedArgs) -> serve.Application:
    """Build an application from the arguments of a file, which are checked."""
    return Echo.bind(args.message)


@serve.deployment
async def sleeper(request: Request) -> str:
    """Answer after half a second."""
    await asyncio.sleep(0.5)
    return "slept"


sleeping_app = sleeper.bind()


def two_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """An autoscaling policy for a deployment."""
    return 2, {}


def coordinated(contexts: dict[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, Any]]:
    """An autoscaling policy for all deployments of an application."""
    return {name: max(1, context.capacity_adjusted_min_replicas) for name, context in contexts.items()}, {}


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Preprocessor:
    """The first of two deployments that scale together."""

    def __init__(self, model: DeploymentHandle) -> None:
        self.model = model

    async def __call__(self, request: Request) -> str:
        return await self.model.remote("prepared")


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Model:
    """The second of two deployments that scale together."""

    def __call__(self, text: Any) -> str:
        return f"{text} scored" if isinstance(text, str) else "scored"


pipeline_app = Preprocessor.bind(Model.bind())
model_app = Model.bind()


@serve.deployment
class GangApp:
    """Answers with the size of its gang."""

    def __call__(self, *args: Any) -> int:
        gang = serve.get_replica_context().gang_context
        return gang.world_size if gang else 0


gang_app = GangApp.bind()


class SharedCounter:
    """An actor that all replicas of a deployment share."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def increment(self) -> int:
        """Increase the count."""
        self.value += 1
        return self.value


@serve.deployment(
    deployment_actors=[
        DeploymentActorConfig(
            name="counter",
            actor_class=SharedCounter,
            init_kwargs={"start": 10},
            actor_options={"num_cpus": 0},
        )
    ]
)
class Counted:
    """Counts its requests in the shared actor."""

    async def __call__(self, request: Request) -> int:
        return await serve.get_deployment_actor("counter").increment.remote()


counted_app = Counted.bind()

api = FastAPI()


@serve.deployment
@serve.ingress(api)
class Chat:
    """Streams over HTTP and over a WebSocket, and takes requests in batches."""

    async def words(self) -> AsyncIterator[str]:
        """Give an answer piece by piece."""
        for word in ("one ", "two"):
            yield word
            await asyncio.sleep(0)

    @api.get("/stream")
    def stream(self) -> StreamingResponse:
        """Stream an answer."""
        return StreamingResponse(self.words(), media_type="text/plain")

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.01)
    async def many(self, numbers: list[int]) -> list[int]:
        """Double several numbers at once."""
        return [2 * each for each in numbers]

    @api.get("/double/{number}")
    async def double(self, number: int) -> int:
        """Double a number."""
        return await self.many(number)

    @api.websocket("/talk")
    async def talk(self, socket: WebSocket) -> None:
        """Send an answer back."""
        await socket.accept()
        await socket.send_text(await socket.receive_text())


chat_app = Chat.bind()


@serve.deployment
class Broken:
    """Its constructor fails."""

    def __init__(self) -> None:
        raise RuntimeError("the weights are not there")

    def __call__(self) -> None:
        """Never answer."""


broken_app = Broken.bind()


@serve.deployment
class Variables:
    """Answers with the value of an environment variable."""

    def __call__(self, request: Request) -> str:
        return os.environ.get("OMP_NUM_THREADS", "none")


variables_app = Variables.bind()


class FirstRouter(RequestRouter):
    """A user's request router."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the first replica."""
        return [candidate_replicas[:1]]
