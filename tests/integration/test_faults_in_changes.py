"""The scheduler dies, hangs or is cut off during a change, which ends in one of two states.

An application of two deployments changes from version 1 to 2: by a file, by a rollback or by a step of a
rollout. Whatever fails meanwhile, both deployments have the same version in the end, no request fails, and
the next change works.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from clusters import Load
from dask_processes import Program, dask_command, dask_worker, fetch, poll_for
from distributed import Client
from ports import free_port

import daskserve as serve
from daskserve.config_file.reading import read
from daskserve.errors import ServeError

MODULE = """
import daskserve as serve

@serve.deployment
class Back:
    def __init__(self, version):
        self._version = version

    async def __call__(self):
        return self._version

@serve.deployment
class Front:
    def __init__(self, version, back):
        self._version, self._back = version, back

    async def __call__(self, request):
        return f"{self._version} {await self._back.remote()}"

def app(args):
    version, rollout = args["version"], args.get("rollout")
    options = {"version": version, "num_replicas": 2}
    front = Front.options(**options, **({"rollout": rollout} if rollout else {}))
    return front.bind(version, Back.options(**options).bind(version))
"""
PLAN = {"steps": ["50%", "100%"], "pause_s": None, "gates": []}
#: Maximum time until the state is stable after a fault.
SETTLED_S = 45.0


class Stage:
    """Two workers and an instance with a store, whose scheduler can be killed and started again."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._port = free_port()
        (folder / "pair_app.py").write_text(MODULE)
        self._scheduler = self._start_scheduler()
        stack.callback(lambda: self._scheduler.kill())
        self._stack = stack
        self._start_workers()
        self._dask = stack.enter_context(Client(self._address))
        self._dask.wait_for_workers(2, timeout=60)
        self.client = stack.enter_context(
            serve.start(
                name="pair",
                store=f"sqlite:///{folder}/records.db",
                http_options={"port": 0},
                dask_client=self._dask,
            )
        )

    @property
    def _address(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    def _start_workers(self) -> None:
        prelude = f"import sys; sys.path.insert(0, {str(self._folder)!r})"
        for _ in range(2):
            self._stack.enter_context(dask_worker(self._address, self._folder, prelude=prelude))

    def _start_scheduler(self) -> Program:
        arguments = ["--no-dashboard", "--host", "127.0.0.1", "--port", str(self._port)]
        return Program(dask_command("scheduler", *arguments), self._folder, keeps_stdin=True)

    def deploy(self, version: str, **args: Any) -> None:
        application = {
            "name": "pair",
            "import_path": "pair_app:app",
            "route_prefix": "/e",
            "args": {"version": version, **args},
        }
        file = read(json.dumps({"applications": [application]}), "pair.json")
        number = self.client.deploy_config(file.config, source="pair.json", version=version)
        if "rollout" not in args:
            self.client.wait_for_config(number, timeout_s=SETTLED_S)

    # ---- faults

    def kill_scheduler(self) -> None:
        self._scheduler.process.send_signal(signal.SIGKILL)
        self._scheduler.wait()
        time.sleep(0.3)
        self._scheduler = self._start_scheduler()

    def silence_scheduler(self) -> None:
        self._scheduler.process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        self._scheduler.process.send_signal(signal.SIGCONT)

    def cut_links(self) -> None:
        """Break the workers' connections to the scheduler, and start other workers, as nannies do.

        A worker whose lost scheduler still answers ends, because the scheduler has removed it.
        """
        self._dask.run(cut_links_to, self._port, wait=False)  # it cuts the link that would bring an answer
        self._start_workers()

    # ---- the verdict

    def answers(self) -> set[str]:
        urls = self.client.http_urls()  # none while the proxy is replaced
        return {fetch(f"{urls[0]}/e").text for _ in range(12)} if urls else set()

    def is_settled(self) -> bool:
        try:
            found = self.client.status().applications["pair"]
        except ServeError:  # its controller is being replaced
            return False
        return str(found.status) in ("RUNNING", "DEPLOY_FAILED") and len(self.answers()) == 1


async def cut_links_to(port: int) -> None:
    """Break all connections of this process to a port without closing them on either side."""
    import psutil

    for each in psutil.Process().net_connections("tcp"):
        if each.raddr and each.raddr.port == port and each.fd > 0:
            sock = socket.socket(fileno=each.fd)
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended
            finally:
                sock.detach()


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(folder, stack)


def change(stage: Stage, verb: str) -> Callable[[], object]:
    """Bring the application to the state before a change; return the change."""
    stage.deploy("1")
    if verb == "file":
        return lambda: stage.deploy("2")
    if verb == "rollback":
        stage.deploy("2")
        return lambda: stage.client.rollback("pair")
    stage.deploy("2", rollout=PLAN)
    name = {"name": "Front", "application": "pair"}
    poll_for(lambda: state_of(stage) == "SERVING", timeout_s=SETTLED_S)
    return lambda: stage.client.promote_rollout(**name)


def state_of(stage: Stage) -> str:
    try:
        return str(stage.client.rollout_status("Front", "pair")["state"])
    except ServeError:
        return ""


@pytest.mark.nightly
@pytest.mark.parametrize("delay_s", [0.05, 0.5, 1.5])
@pytest.mark.parametrize("fault", ["kill_scheduler", "silence_scheduler", "cut_links"])
@pytest.mark.parametrize("verb", ["file", "rollback", "step"])
def test_a_fault_in_the_middle_of_a_change_leaves_one_of_two_states(
    verb: str, fault: str, delay_s: float, tmp_path: Path
) -> None:
    errors: list[Exception] = []
    with stage(tmp_path) as found:
        begin = change(found, verb)

        def run() -> None:
            try:
                begin()
            except Exception as error:  # it may fail; what counts is what is left
                errors.append(error)

        with Load(found.client.http_urls()[0]) as load:
            thread = threading.Thread(target=run)
            thread.start()
            time.sleep(delay_s)
            getattr(found, fault)()
            thread.join(SETTLED_S)
            assert not thread.is_alive(), "the change hangs"
            if verb == "step" and state_of(found) in ("STARTING", "SERVING", "PAUSED"):
                found.client.promote_rollout("Front", "pair", full=True)
            poll_for(found.is_settled, timeout_s=SETTLED_S, what="it does not settle")
            load.more()
        (answer,) = found.answers()
        assert answer in ("1 1", "2 2"), errors
        if fault != "cut_links":  # the proxies leave with their workers
            assert load.failures == []
        found.deploy("3")
        assert found.answers() == {"3 3"}
