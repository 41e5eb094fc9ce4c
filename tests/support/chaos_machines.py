"""The machines of a chaos run, and the faults that can occur on them.

The scheduler runs on ``hub``, the program of the run on ``clients``. Each other machine has one or two
workers; each worker has a nanny in a separate process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from chaos_schedule import SEATS, WORKERS
from dask_processes import Program, dask_command
from machines import Machines

SCHEDULER_PORT = 8786


class ChaosMachines:
    """Dask on machines: a scheduler at a fixed address, and workers with nannies.

    A nanny that ends is restarted after a second, as systemd or Kubernetes would do.
    """

    def __init__(self, machines: Machines, folder: Path) -> None:
        self._machines = machines
        self._folder = folder
        self._scheduler: Program | None = None
        self._nannies: dict[str, Program] = {}
        self._dead_hosts: set[str] = set()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise)
        self.address = f"tcp://{machines.addresses['hub']}:{SCHEDULER_PORT}"

    def ip(self, host: str) -> str:
        return self._machines.addresses[host]

    # ---- start and end

    def start(self) -> None:
        self.start_scheduler()
        for seat in WORKERS:
            self._start_worker(seat)
        self._supervisor.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._supervisor.ident is not None:
            self._supervisor.join()
        for program in (*self._nannies.values(), self._scheduler):
            if program is not None:
                _kill_tree(program)

    def start_scheduler(self) -> None:
        options = ["--no-dashboard", "--host", self.ip("hub"), "--port", str(SCHEDULER_PORT)]
        self._scheduler = self._program("hub", "scheduler", options)

    def _start_worker(self, seat: str) -> None:
        host = host_of(seat)
        options = ["--no-dashboard", "--host", self.ip(host), "--nthreads", "2", "--name", seat]
        self._nannies[seat] = self._program(host, "worker", [self.address, *options])

    def _program(self, host: str, kind: str, options: Sequence[str]) -> Program:
        command = dask_command(kind, *options, prelude=self._machines.enter(host))
        return Program(command, self._folder, keeps_stdin=True)

    def _supervise(self) -> None:
        while not self._is_over.wait(1):
            with self._lock:
                for seat, nanny in list(self._nannies.items()):
                    if nanny.process.poll() is not None and host_of(seat) not in self._dead_hosts:
                        _kill_tree(nanny)
                        self._start_worker(seat)

    # ---- processes

    def processes(self) -> list[psutil.Process]:
        """Return the scheduler, and the workers with their children."""
        assert self._scheduler is not None
        pids = [self._scheduler.process.pid, *(pid for seat in WORKERS for pid in self.worker_pids(seat))]
        return [psutil.Process(pid) for pid in pids]

    def scheduler_pid(self) -> int:
        assert self._scheduler is not None
        return self._scheduler.process.pid

    def worker_pids(self, seat: str) -> list[int]:
        """Return the processes of a worker, its own first, without its nanny."""
        try:
            nanny = psutil.Process(self._nannies[seat].process.pid)
            workers = [each for each in nanny.children() if "spawn_main" in " ".join(each.cmdline())]
            return [pid for each in workers for pid in (each.pid, *_children(each))]
        except psutil.NoSuchProcess:
            return []

    def signalled_pids(self, whom: str, seat: str) -> list[int]:
        """Return the processes that get SIGTERM; see `chaos_schedule.SIGNALLED`."""
        workers = self.worker_pids(seat)
        nanny = self._nannies[seat].process.pid
        found = {
            "worker": workers[:1],
            "nanny": [nanny],
            "service": [nanny, *workers],
            "replicas": workers[1:],
        }
        return found[whom]

    def kill_host(self, host: str) -> None:
        with self._lock:
            self._dead_hosts.add(host)
            for seat in SEATS[host]:
                _kill_tree(self._nannies[seat])

    def revive_host(self, host: str) -> None:
        with self._lock:
            self._dead_hosts.discard(host)
            for seat in SEATS[host]:
                self._start_worker(seat)

    def kill_scheduler(self) -> None:
        assert self._scheduler is not None
        _kill_tree(self._scheduler)

    def end_scheduler(self) -> None:
        """Send SIGTERM to the scheduler, and wait for its end."""
        assert self._scheduler is not None
        self._scheduler.process.terminate()
        self._scheduler.wait()

    # ---- the network

    def cut(self, one: str, other: str, *, both: bool) -> None:
        self._machines.cut(one, other)
        if both:
            self._machines.cut(other, one)

    def mend(self, one: str, other: str, *, both: bool) -> None:
        self._machines.mend(one, other)
        if both:
            self._machines.mend(other, one)

    def unplug(self, host: str) -> None:
        self._machines.unplug(host)

    def plug(self, host: str) -> None:
        self._machines.plug(host)


def stop_for(pid: int, seconds: float) -> None:
    """Suspend a process for some time, unless it ends earlier."""
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def host_of(seat: str) -> str:
    return next(host for host, seats in SEATS.items() if seat in seats)


def _children(process: psutil.Process) -> list[int]:
    return [each.pid for each in process.children(recursive=True)]


def _kill_tree(program: Program) -> None:
    """Kill a program and its child processes at once."""
    if program.process.poll() is None:
        for pid in (*_children(psutil.Process(program.process.pid)), program.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    program.kill()
