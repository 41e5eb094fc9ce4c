"""The network between the simulated processes of a `daskserve.cluster.local.cluster.LocalCluster`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.channel.wire.transport import Transport
from daskserve.cluster.local.records import LocalRecords
from daskserve.cluster.local.run_state import RunState
from daskserve.cluster.local.transport import WhenAwake, connect
from daskserve.cluster.task_queues import InstanceTaskQueues
from daskserve.common.types import WorkerAddress
from daskserve.errors import ActorLostError


class LocalNetwork:
    """Connects processes with each other, and may be cut between two of them.

    Parameters
    ----------
    end_at : callable
        Returns the channels and the state of a worker's process; None if there is no such worker.
    latency_s : callable
        Called for the latency of each message.
    spawn : callable
        Runs a coroutine without waiting for it.
    """

    def __init__(
        self,
        end_at: Callable[[WorkerAddress], tuple[ChannelPool, RunState] | None],
        latency_s: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._end_at = end_at
        self._latency_s = latency_s
        self._spawn = spawn
        self._cut: set[frozenset[WorkerAddress]] = set()
        #: The parts of the parcels that the user's program has sent, by digest.
        self.parcels: dict[str, Sequence[Any]] = {}
        #: Called in the thread that shuts the instance down; it may block.
        self.when_ended: Callable[[], None] | None = None
        #: The log records of the workers.
        self.records = LocalRecords()
        #: The queues of tasks, which a real cluster keeps in the scheduler's process.
        self.tasks = InstanceTaskQueues("memory://", "local")

    def cut(self, one: WorkerAddress, other: WorkerAddress) -> None:
        """Cut off two workers from each other, as if both had already noticed it.

        They still reach the scheduler, and through it each other.
        """
        self._cut.add(frozenset((one, other)))
        for worker, peer in ((one, other), (other, one)):
            channels, _ = self._found(worker)
            channels.break_off(peer)

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
        channels, state = self._found(worker)
        is_cut = frozenset((caller, worker)) in self._cut
        if is_cut and directly:
            raise OSError("the network between them is cut")
        ours, theirs = connect((caller, when_awake), (worker, state.when_awake), self._latency_s)
        ours.is_relayed = is_cut
        self._spawn(channels.serve(theirs))
        return ours

    def _found(self, worker: WorkerAddress) -> tuple[ChannelPool, RunState]:
        end = self._end_at(worker)
        if end is None:
            raise ActorLostError(f"Worker {worker} has left the cluster.", begun=False)
        return end
