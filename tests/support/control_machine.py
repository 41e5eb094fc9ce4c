"""The rules of schedules: requests of clients, faults of the cluster, and the passing of time.

A schedule that fails is printed as Python, which you can paste into a test::

    state = ControlMachine()
    state.begin(seed=0, workers=2, location='NoServer', latency_s=0.0)
    ...
    state.teardown()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedules import Between, Machine, OneOf, Several, first, rule
from simulation import START_S, Simulation

from daskserve.options.actor import ActorOptions

INDEX = Between(0, 5)
#: The time after a rule: none, less than the latency of the store, more than that, or enough to complete.
SECONDS = OneOf(0.0, 0.002, 0.01, 0.1, 2.0)
CLASSIC = OneOf("a", "b")
ANY_BACKEND = OneOf("a", "b", "d")
ANY_ENDPOINT = OneOf("d", "e")
REPLICAS = Between(1, 3)
#: 0 means an autoscaler, and -n an autoscaler that starts with n replicas and keeps them.
COUNTS = Between(0, 3)
AUTOSCALING: dict[str, Any] = {
    "max_replicas": 3,
    "target_ongoing_requests": 1.0,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 3.0,
    "look_back_period_s": 3.0,
}
GANGS: dict[str, Any] = {"num_replicas": 2, "gang_scheduling_config": {"gang_size": 2}}
#: None, or the strategy of a placement group.
GROUPS = OneOf(None, None, None, "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
CONFIGS = OneOf("one", "two", None)
OPTIONS = OneOf({}, {}, {"num_cpus": 2}, {"num_cpus": 4}, {"num_gpus": 1})
SURGES = OneOf(1, 1, 0, "50%")
UNAVAILABLE = OneOf(0, 0, 1, "50%")
ROUTES = OneOf("/x", "/y", None)
TIMEOUT_S = 15.0


def _counted(replicas: int) -> dict[str, Any]:
    if replicas > 0:
        return {"num_replicas": replicas}
    if replicas < 0:
        count = {"min_replicas": 1, "initial_replicas": -replicas, "max_replicas": 8}
        return {"autoscaling_config": {**AUTOSCALING, **count, "downscale_delay_s": 600.0}}
    return {"autoscaling_config": {"min_replicas": 1, **AUTOSCALING}}


def _grouped(strategy: str | None, options: Mapping[str, float], *, is_gang: bool) -> dict[str, Any]:
    """Return the options of a placement group, whose first bundle has room for the replica itself."""
    if strategy is None:
        return {}
    bundles = [ActorOptions(**options).demand(), {"CPU": 1.0}]
    return {"placement_group_bundles": bundles} | ({} if is_gang else {"placement_group_strategy": strategy})


def _pickled(user_config: str | None) -> bytes | None:
    return None if user_config is None else user_config.encode()


class FaultyWorld(Machine):
    """The rules that do not depend on the requests of clients."""

    simulation: Simulation | None = None
    focus: str | None = None

    @property
    def world(self) -> Simulation:
        assert self.simulation is not None
        return self.simulation

    def _backend(self, tag: str) -> str:
        return self.focus or tag

    def _call(self, verb: str, seconds: float, **message: Any) -> None:
        self.world.call(verb, message, seconds=seconds)

    @rule(index=INDEX, seconds=SECONDS)
    def repeat(self, index: int, seconds: float) -> None:
        self.world.repeat(index, seconds=seconds)

    @rule(index=INDEX)
    def cancel_call(self, index: int) -> None:
        self.world.cancel_call(index)

    # ---- behaviour of replicas

    @rule(
        tag=ANY_BACKEND,
        outcomes=Several(OneOf("fail", "hang", "slow", "well"), 1, 4),
    )
    def script_starts(self, tag: str, outcomes: list[str]) -> None:
        self.world.script.starts[self._backend(tag)].extend(outcomes)

    @rule(
        tag=ANY_BACKEND,
        outcomes=Several(OneOf("refuse", "half", "slow", "late", "hang", "well"), 1, 3),
        stops=OneOf("well", "drain", "hang"),
    )
    def script_lives(self, tag: str, outcomes: list[str], stops: str) -> None:
        self.world.script.reconfigurations[self._backend(tag)].extend(outcomes)
        self.world.script.stops[self._backend(tag)].append(stops)

    @rule(index=INDEX, kind=OneOf("fail_checks", "vanish"))
    def spoil_actor(self, index: int, kind: str) -> None:
        self.world.fail_checks(index) if kind == "fail_checks" else self.world.vanish(index)

    # ---- faults of workers

    @rule(
        index=INDEX,
        kind=OneOf("kill", "restart", "suspend", "suspend", "retire", "disconnect"),
        seconds=SECONDS,
    )
    def harm_worker(self, index: int, kind: str, seconds: float) -> None:
        self.world.harm_worker(index, kind)
        self.world.advance(seconds)

    @rule(index=INDEX, seconds=SECONDS)
    def resume_worker(self, index: int, seconds: float) -> None:
        self.world.resume_worker(index)
        self.world.advance(seconds)

    @rule()
    def add_worker(self) -> None:
        self.world.add_worker()

    # ---- faults of the controller

    @rule(kind=OneOf("kill", "restart", "suspend"), seconds=OneOf(0.0, 0.5, 5.0, 9.0))
    def harm_controller(self, kind: str, seconds: float) -> None:
        self.world.harm_controller(kind)
        self.world.advance(seconds)

    @rule(commits=Between(1, 6), kind=OneOf("kill", "restart", "suspend"))
    def harm_controller_after(self, commits: int, kind: str) -> None:
        self.world.harm_controller_after(commits, kind)

    @rule(index=INDEX, traffic=OneOf({"a": 1.0}, {"b": 1.0}, {"d": 1.0}), seconds=SECONDS)
    def call_old_controller(self, index: int, traffic: dict[str, float], seconds: float) -> None:
        message = {"name": "e", "traffic": traffic}
        self.world.call_old_controller(index, "set_traffic", message, seconds=seconds)

    @rule()
    def restart_cluster(self) -> None:
        self.world.restart_cluster()

    # ---- faults of the store and of updates

    @rule(kind=OneOf("answers", "reach"), amount=Between(1, 3))
    def harm_store(self, kind: str, amount: int) -> None:
        if kind == "answers":
            self.world.lose_answers(amount)
        else:
            self.world.lose_store((0.3, 4.0, 20.0)[amount - 1])

    @rule(kind=OneOf("good", "lossy", "late", "doubled", "shuffled"))
    def deliver(self, kind: str) -> None:
        self.world.deliver(kind)

    # ---- time

    @rule(seconds=OneOf(0.001, 0.05, 0.5, 1.0, 3.0, 7.0, 20.0, 45.0))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(when=lambda self: self.simulation is not None and self.simulation.witness.records)
    def rest(self) -> None:
        self.world.rest()

    def teardown(self) -> None:
        if self.simulation is None:
            return
        try:
            self.simulation.rest()
        finally:
            self.close()

    def close(self) -> None:
        if self.simulation is not None:
            self.simulation.close()


class ControlMachine(FaultyWorld):
    """See the module."""

    @first(
        seed=Between(0, 1000),
        workers=Between(1, 4),
        location=OneOf("NoServer", "NoServer", "HeadOnly", "EveryNode", "EveryWorker"),
        latency_s=OneOf(0.0, 0.004, 0.02),
        has_nannies=OneOf(False, True),
        stock=OneOf("", "a", "d", "ad", "ad", "full", "crowded"),
        focus=OneOf(None, None, "a", "d"),
    )
    def begin(
        self,
        seed: int,
        workers: int,
        location: str,
        latency_s: float,
        has_nannies: bool,
        stock: str,
        focus: str | None,
    ) -> None:
        """Start an instance, with a backend and its endpoint (``a``), a deployment (``d``), or both.

        ``full`` is a deployment that leaves no room on any worker. ``crowded`` is an autoscaled deployment
        with two replicas on each worker, so that fewer are enough for an update. With a ``focus``, rules for
        any backend apply to that one.
        """
        self.focus = focus
        self.simulation = Simulation(
            seed=seed, workers=workers, location=location, latency_s=latency_s, has_nannies=has_nannies
        )
        if "a" in stock:
            self.create_backend("a", 2, "one", {}, 2.0)
            self.create_endpoint("e", "/y", "a", 0.1)
        if stock == "full":
            self.deploy("d", "1", None, workers, "one", {"num_cpus": 4}, "/x", 2.0)
        elif stock == "crowded":
            self.deploy("d", "1", None, -2 * workers, "one", {"num_cpus": 2}, "/x", 2.0)
        elif "d" in stock:
            self.deploy("d", "1", None, 2, "one", {}, "/x", 2.0)

    @property
    def has_backends(self) -> bool:
        return self.simulation is not None and bool(self.simulation.witness.wanted.backends)

    @property
    def has_endpoints(self) -> bool:
        return self.simulation is not None and bool(self.simulation.witness.wanted.endpoints)

    def _spec(self, tag: str, **fields: Any) -> dict[str, Any]:
        made: dict[str, Any] = {
            "tag": self._backend(tag),
            "code": b"code-1",
            "config": {},
            "user_config": None,
            "actor_options": {},
            "version": "v1",
            "user_version": None,
            "prev_version": None,
            "env": None,
            "request_id": self.world.request_id(),
            # Every second change has a time limit without progress instead of a total limit.
            "timeout_s": TIMEOUT_S if self.world.request_count % 2 else None,
            "progress_timeout_s": TIMEOUT_S,
        }
        made |= fields
        return made | {"config": {**made["config"], "start_timeout_s": START_S}}

    # ---- requests of clients

    @rule(tag=CLASSIC, replicas=COUNTS, user_config=CONFIGS, options=OPTIONS, seconds=SECONDS)
    def create_backend(
        self, tag: str, replicas: int, user_config: str | None, options: dict[str, float], seconds: float
    ) -> None:
        spec = self._spec(
            tag,
            config=_counted(replicas),
            user_config=_pickled(user_config),
            actor_options=options,
        )
        self._call("create_backend", seconds, spec=spec)

    @rule(when=lambda self: self.has_backends, tag=ANY_BACKEND, replicas=REPLICAS, seconds=SECONDS)
    def scale(self, tag: str, replicas: int, seconds: float) -> None:
        self._update(tag, seconds, {"num_replicas": replicas}, None)

    @rule(when=lambda self: self.has_backends, tag=ANY_BACKEND, user_config=CONFIGS, seconds=SECONDS)
    def reconfigure(self, tag: str, user_config: str | None, seconds: float) -> None:
        config = {"max_ongoing_requests": 5} if user_config is None else {}
        self._update(tag, seconds, config, user_config)

    @rule(when=lambda self: self.has_backends, tag=ANY_BACKEND, least=Between(0, 3), seconds=SECONDS)
    def autoscale(self, tag: str, least: int, seconds: float) -> None:
        """Turn on autoscaling, within some bounds."""
        self._update(tag, seconds, {"autoscaling_config": {"min_replicas": least, **AUTOSCALING}}, None)

    @rule(when=lambda self: self.has_backends, tag=ANY_BACKEND, replicas=REPLICAS, seconds=SECONDS)
    def turn_off_autoscaling(self, tag: str, replicas: int, seconds: float) -> None:
        self._update(tag, seconds, {"num_replicas": replicas, "autoscaling_config": None}, None)

    @rule(
        when=lambda self: self.has_backends,
        tag=ANY_BACKEND,
        waiting=Between(0, 5),
        seconds=OneOf(0.0, 2.0, 8.0),
    )
    def load(self, tag: str, waiting: int, seconds: float) -> None:
        self.world.set_load(self._backend(tag), waiting)
        self.world.advance(seconds)

    def _update(self, tag: str, seconds: float, config: dict[str, Any], user_config: str | None) -> None:
        self._call(
            "update_backend_config",
            seconds,
            tag=self._backend(tag),
            config=config,
            user_config=_pickled(user_config),
            sets_user_config=user_config is not None,
            timeout_s=TIMEOUT_S,
        )

    @rule(
        tag=OneOf("d", "d", "d", "a"),
        version=OneOf("1", "2", "3", None),
        prev_version=OneOf(None, None, None, "1", "2"),
        replicas=COUNTS,
        user_config=CONFIGS,
        options=OPTIONS,
        route=ROUTES,
        seconds=SECONDS,
        max_surge=SURGES,
        max_unavailable=UNAVAILABLE,
        gang=OneOf(False, False, True),
        group=GROUPS,
    )
    def deploy(
        self,
        tag: str,
        version: str | None,
        prev_version: str | None,
        replicas: int,
        user_config: str | None,
        options: dict[str, float],
        route: str | None,
        seconds: float,
        max_surge: int | str = 1,
        max_unavailable: int | str = 0,
        gang: bool = False,
        group: str | None = None,
    ) -> None:
        pace = {"max_surge": max_surge} if max_surge != 1 else {}
        pace |= {"max_unavailable": max_unavailable} if max_unavailable != 0 else {}
        spec = self._spec(
            tag,
            code=b"code-" + str(version).encode(),
            version=version or f"unversioned-{self.world.request_id()}",
            user_version=version,
            prev_version=prev_version,
            config=(GANGS if gang else _counted(replicas)) | pace | _grouped(group, options, is_gang=gang),
            user_config=_pickled(user_config),
            actor_options=options,
        )
        self._call("deploy", seconds, spec=spec, route=route, methods=["GET"], python_methods=[])

    @rule(when=lambda self: self.has_backends, tag=ANY_BACKEND, force=OneOf(False, True), seconds=SECONDS)
    def delete_backend(self, tag: str, force: bool, seconds: float) -> None:
        self._call("delete_backend", seconds, tag=self._backend(tag), force=force)

    @rule(name=OneOf("d", "a"), force=OneOf(False, True), seconds=SECONDS)
    def delete_deployment(self, name: str, force: bool, seconds: float) -> None:
        self._call("delete_deployment", seconds, name=self._backend(name), force=force)

    @rule(when=lambda self: self.has_backends, age=Between(0, 1), seconds=SECONDS)
    def withdraw(self, age: int, seconds: float) -> None:
        """Withdraw the last call that created or deployed something, or the one before."""
        asked = [each.message["spec"]["request_id"] for each in self.world.calls if "spec" in each.message]
        if asked:
            request = asked[-1 - min(age, len(asked) - 1)]
            self._call("withdraw", seconds, requests=[request])

    @rule(percent=OneOf(0, 10, 50, 50, 100, None, None), seconds=SECONDS)
    def set_target_capacity(self, percent: float | None, seconds: float) -> None:
        self._call("set_target_capacity", seconds, percent=percent)

    @rule(name=ANY_ENDPOINT, route=ROUTES, backend=ANY_BACKEND, seconds=SECONDS)
    def create_endpoint(self, name: str, route: str | None, backend: str, seconds: float) -> None:
        request_id = self.world.request_id()
        self._call(
            "create_endpoint",
            seconds,
            name=name,
            route=route,
            methods=["GET"],
            backend=self._backend(backend),
            request_id=request_id,
        )

    @rule(when=lambda self: self.has_endpoints, name=ANY_ENDPOINT, seconds=SECONDS)
    def delete_endpoint(self, name: str, seconds: float) -> None:
        self._call("delete_endpoint", seconds, name=name)

    @rule(
        when=lambda self: self.has_endpoints,
        name=ANY_ENDPOINT,
        traffic=OneOf({"a": 1.0}, {"b": 1.0}, {"a": 0.25, "b": 0.75}, {"d": 1.0}),
        seconds=SECONDS,
    )
    def set_traffic(self, name: str, traffic: dict[str, float], seconds: float) -> None:
        self._call("set_traffic", seconds, name=name, traffic=traffic)

    @rule(
        when=lambda self: self.has_endpoints,
        name=ANY_ENDPOINT,
        backend=ANY_BACKEND,
        proportion=OneOf(0.0, 0.5, 1.0),
        seconds=SECONDS,
    )
    def shadow_traffic(self, name: str, backend: str, proportion: float, seconds: float) -> None:
        self._call(
            "shadow_traffic", seconds, name=name, backend=self._backend(backend), proportion=proportion
        )
