"""A builder of declared applications that returns the specs of a test instead of importing code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from control_harness import app_spec

from daskserve.cluster.protocols.base import ActorContext
from daskserve.options.start_messages import BuilderStart
from daskserve.telemetry.table import MetricSample

Config = Mapping[str, Any]


def config(name: str = "shop", version: str = "1", route: str | None = "", **options: Any) -> dict[str, Any]:
    """Return the configuration of an application; ``options`` are those of its one deployment, ``d``.

    The default route is its name.
    """
    return {
        "name": name,
        "import_path": f"{name}:app",
        "route_prefix": f"/{name}" if route == "" else route,
        "args": {"version": version, **options},
    }


def instance_config(*applications: Config, **options: Any) -> dict[str, Any]:
    return {"applications": list(applications), **options}


class Script:
    """The behavior of builders.

    Attributes
    ----------
    built
        The names of the applications of each build, in order.
    before
        Awaited before each application is built; if it returns an error, the build fails with it.
    """

    def __init__(self) -> None:
        self.built: list[list[str]] = []
        self.before: Callable[[str, str], Awaitable[str | None]] | None = None
        self._requests = 0

    async def build(self, config: Config, worker: str) -> dict[str, Any]:
        error = None if self.before is None else await self.before(config["name"], worker)
        if error is not None:
            return {"error": error, "user_traceback": "Traceback: line 1"}
        self._requests += 1
        options = dict(config.get("args", {}))
        version = options.pop("version", "1")
        spec = app_spec(
            config["name"],
            {"d": ()},
            route=config["route_prefix"],
            request_id=f"build-{self._requests}",
            d={"version": version, **options},
        )
        return {"spec": spec.to_plain()}


class ScriptedBuilder:
    """See the module."""

    def __init__(self, script: Script, context: ActorContext) -> None:
        self._script = script
        self._context = context
        self.verbs: Mapping[str, Any] = {}
        self._stage = ("waiting", context.clock.now())

    def stage(self) -> tuple[str, float]:
        return self._stage

    async def start(self) -> dict[str, Any]:
        configs = BuilderStart.decode(self._context.spec.payload).configs
        self._script.built.append([each["name"] for each in configs])
        built = []
        for each in configs:
            self._stage = f"building {each['name']!r} from {each['import_path']!r}", self._context.clock.now()
            built.append(await self._script.build(each, self._context.worker))
        return {"built": built}

    async def stop(self, grace_s: float) -> None: ...

    def handle(self, envelope: Any) -> Any:
        raise NotImplementedError

    def samples(self) -> list[MetricSample]:
        return []
