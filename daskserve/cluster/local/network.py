"""The network between the simulated processes of a `daskserve.cluster.local.cluster.LocalCluster`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.channel.wire.transport import Transport
from daskserve.cluster.local.run_state import RunState
from daskserve.cluster.local.transport import WhenAwake, connect
from daskserve.common.types import WorkerAddress
from daskserve.errors import ActorLostError


class Connected(Protocol):
    """The part of a simulated process that the network uses."""

    channels: ChannelPool
    state: RunState


class HoldsProcess(Protocol):
    """A simulated worker."""

    @property
    def process(self) -> Connected: ...


class LocalNetwork:
    """Connects processes with each other, and may be cut between two of them.

    Parameters
    ----------
    hosts : mapping
        The current workers.
    latency_s : callable
        Called for the latency of each message.
    spawn : callable
        Runs a coroutine without waiting for it.
    """

    def __init__(
        self,
        hosts: Mapping[WorkerAddress, HoldsProcess],
        latency_s: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._hosts = hosts
        self._latency_s = latency_s
        self._spawn = spawn
        self._cut: set[frozenset[WorkerAddress]] = set()

    def cut(self, one: WorkerAddress, other: WorkerAddress) -> None:
        """Cut two workers off from each other, as if both had noticed by now.

        They still reach the scheduler, and through it each other.
        """
        self._cut.add(frozenset((one, other)))
        self._hosts[one].process.channels.break_off(other)
        self._hosts[other].process.channels.break_off(one)

    def mend(self, one: WorkerAddress, other: WorkerAddress) -> None:
        """Undo `cut`."""
        self._cut.discard(frozenset((one, other)))

    def connect(
        self, caller: str, when_awake: WhenAwake, worker: WorkerAddress, *, directly: bool = False
    ) -> Transport:
        """Return one end of a new connection to a worker.

        Raises
        ------
        ActorLostError
            There is no such worker.
        OSError
            With ``directly``: the two are cut off from each other.
        """
        host = self._hosts.get(worker)
        if host is None:
            raise ActorLostError(f"Worker {worker} has left the cluster.", begun=False)
        is_cut = frozenset((caller, worker)) in self._cut
        if is_cut and directly:
            raise OSError("the network between them is cut")
        process = host.process
        ours, theirs = connect((caller, when_awake), (worker, process.state.when_awake), self._latency_s)
        ours.is_relayed = is_cut
        self._spawn(process.channels.serve(theirs))
        return ours
