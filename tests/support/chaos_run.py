"""One chaos run: an instance under load, on machines with scheduled faults. See `scripts/chaos`."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from chaos_app import requests_in_process
from chaos_clients import Balancer, Clients
from chaos_faults import Faults, Watch
from chaos_machines import ChaosMachines
from chaos_schedule import WORKERS, Round
from chaos_verdict import Run, Stall
from dask_processes import poll_for
from distributed import Client

import daskserve as serve
from daskserve.config_file.reading import read
from daskserve.errors import DeployError

PORT = 8000
REPLICAS = 4
#: Pause between deploys, which are part of the load.
DEPLOY_S = 6.0
#: Maximum time until everything runs again after a round, with processes that start at the same time.
WHOLE_S = 60.0
#: How much more the processes may use at the end than at the beginning: a share, and a number.
MORE_SHARE, MORE_COUNT, MORE_MB = 0.15, 20, 150.0


@dataclass(frozen=True)
class Setting:
    """The options of the run and of the instance."""

    server: str = "tornado"
    location: str = "HeadOnly"
    isolation: str = "thread"

    @property
    def proxies(self) -> int:
        return 1 if self.location == "HeadOnly" else len(WORKERS)


@dataclass(frozen=True)
class Use:
    """The resources that the processes of an instance use without requests."""

    threads: int
    descriptors: int
    memory_mb: float

    def excess(self, before: Use) -> list[str]:
        found = []
        for name in ("threads", "descriptors", "memory_mb"):
            was, now = getattr(before, name), getattr(self, name)
            more = MORE_MB if name == "memory_mb" else MORE_COUNT
            if now > was * (1 + MORE_SHARE) + more:
                found.append(f"{name} after the run: {now:.0f}, before: {was:.0f}")
        return found


class ChaosRun:
    """An instance under load, on machines that fail."""

    def __init__(self, machines: ChaosMachines, folder: Path, setting: Setting, say: Callable[[str], None]):
        self._machines = machines
        self._folder = folder
        self._setting = setting
        self._say = say
        self._notes = folder / "notes"
        self._store = folder / "store" / "records.db"
        self._deploying = threading.Lock()
        self._deploy_errors: list[str] = []
        self._version = 0
        self._round = 0
        self._acknowledged: list[tuple[float, int]] = []
        self._leftovers: list[str] = []
        self._load_began = 0.0

    # ---- the story

    def play(self, rounds: Iterable[Round], lasts_s: float) -> Run:
        """Start everything, play rounds for some time, and return what happened."""
        origin = time.monotonic()
        with ExitStack() as stack:
            self._machines.start()
            stack.callback(self._machines.stop)
            self._dask = stack.enter_context(Client(self._machines.address, set_as_default=False))
            self._dask.wait_for_workers(len(WORKERS), timeout=60)
            self._client = self._start_instance()
            balancer = Balancer()
            stack.callback(balancer.stop)
            self._watch = Watch(self._client, balancer)
            self._faults = Faults(
                self._machines,
                self._watch,
                self._dask,
                has_one_proxy=self._setting.proxies == 1,
                store=self._store,
                deploy=self._deploy,
                ran_in=lambda request_id: [pid for pid, _ in self._noted().get(request_id, ())],
                say=lambda line: self._say(f"round {self._round}: {line}"),
            )
            handle = self._client.get_handle("target")
            self._clients = Clients(balancer, lambda each: int(handle.call.remote(each).result(timeout_s=40)))
            stalls = StallWatch()
            stack.enter_context(repeated(stalls.STEP_S, stalls.look))
            stack.enter_context(repeated(0.5, self._watch.look))
            self._play(rounds, origin + lasts_s)
        return Run(
            self._clients.samples,
            self._faults.damages,
            self._ran(),
            self._acknowledged,
            stalls.stalls,
            [*self._faults.failures, *self._leftovers],
            origin,
            self._load_began,
        )

    def _play(self, rounds: Iterable[Round], until: float) -> None:
        self._wait_until_whole()
        self._warm_up()
        before = self._use()
        self._say(f"whole: {before}")
        self._load_began = time.monotonic()
        self._clients.start()
        try:
            with repeated(DEPLOY_S, self._deploy):
                for each in rounds:
                    self._round += 1
                    self._play_round(each)
                    if time.monotonic() > until:
                        break
        finally:
            self._clients.stop()
        self._deploy()
        self._wait_until_whole()
        if not self._leftovers and self._client.get_deployment_info("target")[0].version != str(
            self._version
        ):
            self._leftovers.append("the last version is not deployed")
        self._check_rest(before)
        self._client.shutdown()

    def _start_instance(self) -> serve.Client:
        self._store.parent.mkdir()
        http = {
            "host": "0.0.0.0",
            "port": PORT,
            "location": self._setting.location,
            "server": self._setting.server,
        }
        options = {"detached": True, "store": f"sqlite:///{self._store}", "http_options": http}
        self._client = serve.start(dask_client=self._dask, **options)
        self._deploy()
        if not self._acknowledged:
            raise RuntimeError(f"the first deploy failed: {self._deploy_errors}")
        return self._client

    def _warm_up(self) -> None:
        """Use every part once, so that all threads and connections exist."""
        self._clients.start()
        try:
            time.sleep(3)
            poll_for(self._requests, 10, what="no gauge shows the requests that are under way")
        finally:
            self._clients.stop()
        self._deploy()
        poll_for(lambda: not self._requests(), 20, what="requests are left after the first load", every_s=0.2)

    def _play_round(self, faults: Round) -> None:
        self._say(f"round {self._round}: {' + '.join(map(str, faults))}")
        began = time.monotonic()
        threads = [threading.Thread(target=self._faults.act, args=(each, self._round)) for each in faults]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        healed = time.monotonic()
        missing = self._wait_until_whole(with_clients=True)
        after = f"whole again {time.monotonic() - healed:.1f} s after the end of {healed - began:.1f} s"
        self._say(f"round {self._round}: {missing or after}")
        if missing:
            self._leftovers.append(f"round {self._round}: not whole after {WHOLE_S:g} s: {missing}")

    # ---- the load that changes things

    def _deploy(self) -> None:
        with self._deploying:
            self._version += 1
            version = self._version
            began = time.monotonic()
            try:
                self._deploy_file(version)
            except Exception as error:
                took_s = time.monotonic() - began
                self._deploy_errors.append(f"{type(error).__name__}: {error}")
                self._say(
                    f"round {self._round}: deploy of {version} failed in {took_s:.1f} s: {error!r:.200}"
                )
            else:
                self._acknowledged.append((time.monotonic(), version))

    def _deploy_file(self, version: int) -> None:
        """Deploy a file with a new version; return once it runs."""
        override = {
            "name": "target",
            "num_replicas": REPLICAS,
            "isolation": self._setting.isolation,
            "version": str(version),
        }
        application = {
            "name": "default",
            "import_path": "chaos_app:app",
            "route_prefix": "/target",
            "args": {"version": version, "notes": str(self._notes)},
            "deployments": [override],
        }
        file = read(json.dumps({"applications": [application]}), "chaos.json")
        number = self._client.deploy_config(file.config, source="chaos.json", version=str(version))
        for name, each in self._client.wait_for_config(number).items():
            if each["status"] != "RUNNING":
                raise DeployError(f"application {name!r} is {each['status']}: {each['message']}")

    # ---- looks

    def _wait_until_whole(self, *, with_clients: bool = False) -> str:
        """Wait until everything runs and clients get answers; return what is missing at the timeout."""
        since = time.monotonic()
        while True:
            missing = self._missing() if self._watch.asked > since else "a new status"
            if not missing and with_clients:
                missing = self._clients.unanswered(since)
            if not missing or time.monotonic() > since + WHOLE_S:
                return missing
            time.sleep(0.2)

    def _missing(self) -> str:
        status = self._watch.status
        found = {each.get("name") for each in self._dask.scheduler_info(n_workers=-1)["workers"].values()}
        waits = {
            "workers": sorted(set(WORKERS) - found),
            "unresponsive workers": status.unresponsive_workers,
            "broken routes": status.broken_routes,
            "backends": [
                name
                for name, each in status.backends.items()
                if each.running < each.wanted or each.status not in ("HEALTHY", "UPDATING")
            ],
            "proxies": [
                f"{len(status.proxies)} of {self._setting.proxies}: {status.proxies}"
                for _ in [0]
                if sorted(status.proxies.values()) != ["HEALTHY"] * self._setting.proxies
            ],
            "controllers": [0] if not self._watch.pids_of("controller") else [],
        }
        return ", ".join(f"{name}: {each}" for name, each in waits.items() if each)

    def _noted(self) -> dict[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for line in self._notes.read_text().splitlines():
            request_id, pid, parent = line.split()
            found[request_id].append((int(pid), int(parent)))
        return found

    def _ran(self) -> dict[str, list[frozenset[int]]]:
        return {name: [frozenset(pids) for pids in each] for name, each in self._noted().items()}

    def _requests(self) -> dict[str, Any]:
        """Return the gauges of requests in all processes that are not zero."""
        found = self._dask.run(requests_in_process)
        found["this program"] = requests_in_process()
        return {place: each for place, each in found.items() if each}

    def _use(self) -> Use:
        processes = self._machines.processes()
        return Use(
            sum(each.num_threads() for each in processes),
            sum(each.num_fds() for each in processes),
            sum(each.memory_info().rss for each in processes) / 1e6,
        )

    def _check_rest(self, before: Use) -> None:
        """Wait until the processes use as much as before; record the resources that stay in use."""
        left: list[str] = []

        def is_as_before() -> bool:
            try:
                left[:] = [*map(str, self._requests().items()), *self._use().excess(before)]
            except (psutil.NoSuchProcess, OSError) as error:
                left[:] = [repr(error)]
            return not left

        try:
            poll_for(is_as_before, 30, every_s=0.5)
        except AssertionError:
            self._leftovers += left
        self._say(f"at the end: {self._use()}")


class StallWatch:
    """Records when this program did not run for a while, because the machine was busy."""

    STEP_S = 0.05

    def __init__(self) -> None:
        self.stalls: list[Stall] = []
        self._before = time.monotonic()

    def look(self) -> None:
        now = time.monotonic()
        late_s = now - self._before - self.STEP_S
        if late_s > 3 * self.STEP_S:
            self.stalls.append(Stall(self._before, late_s))
        self._before = now


@contextmanager
def repeated(pause_s: float, act: Callable[[], None]) -> Iterator[None]:
    """Call a function repeatedly while the block runs."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(pause_s):
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
