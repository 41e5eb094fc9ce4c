"""The faults of a chaos run: each kind of fault, and a record of its effects."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos_clients import Balancer, by_http
from chaos_machines import ChaosMachines, stop_for
from chaos_schedule import ROLES, SEATS, WORKERS, Fault
from chaos_verdict import Damage
from distributed import Client

import daskserve as serve
from daskserve.client.views.status import Status

#: Maximum time until a process that got SIGTERM ends: the grace period, plus a margin for a busy machine.
SIGTERM_S = 35.0


@dataclass
class Watch:
    """The last status of the instance, which is read continuously."""

    client: serve.Client
    balancer: Balancer
    status: Status = field(default_factory=Status)
    #: When the last status was requested.
    asked: float = 0.0

    def look(self) -> None:
        asked = time.monotonic()
        try:
            status = self.client.status()
        except Exception:
            # The scheduler or the controller does not answer; keep the last status.
            return
        if status.instance:
            self.status, self.asked = status, asked
            self.balancer.know(status.http_urls)

    def pids_of(self, kind: str) -> set[int]:
        return {each.pid for each in self.status.actors if each.kind == kind and each.pid is not None}

    def proxies(self) -> dict[int, str]:
        """Return the addresses of the machines of all proxies, by process."""
        found = {}
        for each in self.status.actors:
            if each.kind == "proxy" and each.pid is not None and each.worker is not None:
                found[each.pid] = each.worker.removeprefix("tcp://").partition(":")[0]
        return found


class Faults:
    """Causes faults, and records them as damages."""

    def __init__(
        self,
        machines: ChaosMachines,
        watch: Watch,
        dask: Client,
        *,
        has_one_proxy: bool,
        store: Path,
        deploy: Callable[[], None],
        ran_in: Callable[[str], list[int]],
        say: Callable[[str], None],
    ) -> None:
        self._machines = machines
        self._watch = watch
        self._dask = dask
        self._has_one_proxy = has_one_proxy
        self._store = store
        self._deploy = deploy
        self._ran_in = ran_in
        self._say = say
        self._round = 0
        self.damages: list[Damage] = []
        #: The faults that could not be caused.
        self.failures: list[str] = []

    def act(self, fault: Fault, round_number: int) -> None:
        """Cause a fault, from its beginning to its end."""
        self._round = round_number
        time.sleep(fault.at_s)
        acts: dict[str, Callable[[Fault], None]] = {
            "kill worker": self._kill_worker,
            "kill host": self._kill_host,
            "stop worker": self._stop_worker,
            "cut": self._cut,
            "cut off host": self._cut_off_host,
            "retire": self._retire,
            "sigterm": self._sigterm,
            "sigterm host": self._sigterm_host,
            "sigterm scheduler": self._sigterm_scheduler,
            "freeze scheduler": self._freeze_scheduler,
            "kill scheduler": self._kill_scheduler,
            "poison": self._poison,
            "redeploy": self._redeploy,
            "remove store": self._remove_store,
        }
        try:
            acts[fault.kind](fault)
        except Exception as error:
            self.failures.append(f"round {round_number}: {fault} could not be done: {error!r}")

    @contextmanager
    def _damage(
        self, fault: Fault, pids: Iterable[int] = (), *, cuts_off_proxies: bool = True
    ) -> Iterator[set[int]]:
        """Record a fault that lasts as long as the block, and the processes that it affects."""
        began, hit = time.monotonic(), set(pids)
        proxies = self._watch.proxies()
        yield hit
        lost = {pid for pid in proxies if cuts_off_proxies and pid in hit}
        damage = Damage(
            fault.kind,
            str(fault),
            self._round,
            began,
            time.monotonic(),
            frozenset(hit),
            frozenset(proxies[pid] for pid in lost),
            hits_last_proxy=self._has_one_proxy and bool(hit) and len(lost) == len(proxies),
        )
        self.damages.append(damage)

    def _seat(self, target: str) -> str:
        """Return the worker that a fault names by role; any worker if none has this role now."""
        if target in ROLES:
            wanted = self._watch.pids_of(target)
            having = [seat for seat in WORKERS if wanted.intersection(self._machines.worker_pids(seat))]
            return having[0] if having else WORKERS[0]
        return target

    def _pids_on(self, *hosts: str) -> list[int]:
        return [pid for host in hosts for seat in SEATS[host] for pid in self._machines.worker_pids(seat)]

    def _kill_worker(self, fault: Fault) -> None:
        pids = self._machines.worker_pids(self._seat(fault.target))
        with self._damage(fault, pids):
            _signal(pids[:1], signal.SIGKILL)

    def _kill_host(self, fault: Fault) -> None:
        with self._damage(fault, self._pids_on(fault.target)):
            self._machines.kill_host(fault.target)
            time.sleep(fault.lasts_s)
            self._machines.revive_host(fault.target)

    def _stop_worker(self, fault: Fault) -> None:
        pids = self._machines.worker_pids(self._seat(fault.target))
        with self._damage(fault, pids):
            for pid in pids[:1]:
                stop_for(pid, fault.lasts_s)

    def _cut(self, fault: Fault) -> None:
        one, other, *both = fault.target.split()
        with self._damage(fault, self._pids_on(one, other), cuts_off_proxies=False):
            self._machines.cut(one, other, both=bool(both))
            time.sleep(fault.lasts_s)
            self._machines.mend(one, other, both=bool(both))

    def _cut_off_host(self, fault: Fault) -> None:
        with self._damage(fault, self._pids_on(fault.target)):
            self._machines.unplug(fault.target)
            time.sleep(fault.lasts_s)
            self._machines.plug(fault.target)

    def _retire(self, fault: Fault) -> None:
        seat = self._seat(fault.target)
        with self._damage(fault):
            self._dask.retire_workers(names=[seat])

    def _sigterm(self, fault: Fault) -> None:
        whom, target = fault.target.split()
        self._end(fault, self._machines.signalled_pids(whom, self._seat(target)))

    def _sigterm_host(self, fault: Fault) -> None:
        seats = SEATS[fault.target]
        self._end(fault, [pid for seat in seats for pid in self._machines.signalled_pids("service", seat)])

    def _end(self, fault: Fault, pids: Sequence[int]) -> None:
        """Send SIGTERM to processes and wait for their end, which must not affect any request."""
        with self._damage(fault):
            _signal(pids, signal.SIGTERM)
            deadline = time.monotonic() + SIGTERM_S
            while any(map(_is_alive, pids)):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{pids} did not all end within {SIGTERM_S:g} s")
                time.sleep(0.05)

    def _sigterm_scheduler(self, fault: Fault) -> None:
        with self._damage(fault):
            self._machines.end_scheduler()
            time.sleep(fault.lasts_s)
            self._machines.start_scheduler()

    def _freeze_scheduler(self, fault: Fault) -> None:
        with self._damage(fault):
            stop_for(self._machines.scheduler_pid(), fault.lasts_s)

    def _kill_scheduler(self, fault: Fault) -> None:
        with self._damage(fault):
            self._machines.kill_scheduler()
            time.sleep(fault.lasts_s)
            self._machines.start_scheduler()

    def _poison(self, fault: Fault) -> None:
        request_id = f"poison-{self._round}"
        with self._damage(fault) as hit:
            try:
                with self._watch.balancer.connection() as (address, sock):
                    by_http(address, sock, "poison", request_id)
            except Exception as error:
                self._say(f"the poisonous request ended with {error}")
            hit.update(self._ran_in(request_id))
            self._say(f"the poisonous request ended {len(hit)} processes")

    def _redeploy(self, fault: Fault) -> None:
        with self._damage(fault):
            self._deploy()

    def _remove_store(self, fault: Fault) -> None:
        with self._damage(fault):
            for path in self._store.parent.iterdir():
                path.unlink()
            time.sleep(fault.lasts_s)
            self._watch.client.rewrite_store()


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
