"""The route of a connection to a worker, and the memory of blocked hosts."""

from __future__ import annotations

import asyncio
from typing import Any

import dask
import pytest
from wires import connected

from daskserve.cluster.channel.connect.comm_transport import CommTransport
from daskserve.cluster.channel.connect.dialling import CHANNEL_OP, READY, SPLICE_OP, Dialler, RouteMemory
from daskserve.cluster.channel.connect.handshake import Admission, UntrustedPeerError
from daskserve.cluster.channel.connect.keyring import ChannelSecret, Keyring
from daskserve.common import settings
from daskserve.common.clock import LoopClock
from daskserve.common.settings import ChannelSettings
from daskserve.errors import ActorLostError, NotRunningError
from daskserve.payload.packed_errors import dump_error
from daskserve.testing import run_virtual

pytestmark = pytest.mark.smoke

SCHEDULER = "tcp://10.0.0.1:8786"
WORKER, NEIGHBOUR, ELSEWHERE = "tcp://10.0.0.2:4000", "tcp://10.0.0.2:4001", "tcp://10.0.0.3:4000"
HANDSHAKE = {"compression": "lz4", "pickle-protocol": 5}


class Comm:
    """A connection whose other end gives some answers, and then carries out the handshake."""

    peer_address = WORKER

    def __init__(self, far: Admission, *answers: Any) -> None:
        self.written: list[Any] = []
        self._near, self._far = connected()
        self._admission = far
        self.is_aborted = False
        self.local_info = {"compression": "lz4", "pickle-protocol": 5}
        self.handshake_options: Any = None
        self._answers = list(answers)

    async def write(self, message: Any) -> None:
        if not isinstance(message, bytes):
            self.written.append(message)
            return
        if not self._near.sent:
            self._admitting = asyncio.create_task(self._admission.admit(self._far))
        await self._near.send(message)

    async def read(self) -> Any:
        if self._answers:
            return self._answers.pop(0)
        return await self._near.receive_message()

    def abort(self) -> None:
        self.is_aborted = True

    @staticmethod
    def handshake_configuration(local: Any, remote: Any) -> Any:
        return local, remote


class Network:
    """A network on which only the given addresses answer; records the dialled addresses."""

    def __init__(self, *reachable: str, gone: bool = False, handshake: Any = HANDSHAKE) -> None:
        self.reachable = set(reachable)
        self.tried: list[str] = []
        self.comms: list[Comm] = []
        self.host_answer: Any = READY
        self.answer: Any = {"handshake": handshake, "by_socket": False}
        #: The secrets of the workers, and the secret that the scheduler returns to programs.
        self.keyring = Keyring()
        self.secret = ChannelSecret()
        self.keyring.add(self.secret)
        self.is_supervised = True
        self.asked = 0
        #: The secrets of the dialling process.
        self.known = Keyring(self.fetch_secret)
        if gone:
            self.answer = {"error": dump_error(ActorLostError("gone", begun=False))}

    async def connect(self, address: str, timeout_s: float, **connection_args: Any) -> Comm:
        assert connection_args == {"ssl_context": "ours"}
        self.tried.append(address)
        if address not in self.reachable:
            if address == ELSEWHERE:
                await asyncio.sleep(timeout_s)
            raise OSError("refused")
        answer = self.answer if address == SCHEDULER else self.host_answer
        self.comms.append(Comm(Admission(self.keyring), answer))
        return self.comms[-1]

    async def fetch_secret(self) -> bytes:
        self.asked += 1
        if not self.is_supervised:
            raise NotRunningError("No daskserve instance runs on this Dask cluster.")
        return await self.secret.reveal()

    def dialler(self, **options: Any) -> Dialler:
        channel = ChannelSettings(**options)
        return Dialler(
            {"ssl_context": "ours"},
            lambda: SCHEDULER,
            channel,
            LoopClock(),
            self.known,
            self.connect,
        )


def dial(network: Network, worker: str, **options: Any) -> Comm:
    """Dial a worker and return the comm that was used."""

    async def main() -> None:
        transport = await network.dialler(**options).dial(worker)
        assert isinstance(transport, CommTransport)  # these comms have no socket

    run_virtual(main)
    return network.comms[-1]


def test_a_reachable_worker_is_dialled_directly() -> None:
    network = Network(SCHEDULER, WORKER)
    comm = dial(network, WORKER)
    assert network.tried == [WORKER]
    assert comm.written == [{"op": CHANNEL_OP, "by_socket": True}]


def test_a_worker_without_a_host_is_not_the_intended_one() -> None:
    """Another worker has taken over its address; nothing was sent to it."""
    network = Network(SCHEDULER, WORKER)
    network.host_answer = None
    with pytest.raises(ActorLostError, match="has no Host") as caught:
        dial(network, WORKER)
    assert not caught.value.begun
    assert network.tried == [WORKER]
    assert network.comms[0].is_aborted


def test_an_unreachable_worker_is_reached_through_the_scheduler() -> None:
    network = Network(SCHEDULER)
    comm = dial(network, WORKER)
    assert network.tried == [WORKER, SCHEDULER]
    (message,) = comm.written
    assert (message["op"], message["worker"], message["by_socket"]) == (SPLICE_OP, WORKER, False)
    # The two ends of a splice agree on the packing as if they were connected directly.
    assert comm.handshake_options == (comm.local_info, HANDSHAKE)


def test_a_splice_that_carries_messages_packs_for_the_scheduler() -> None:
    network = Network(SCHEDULER, handshake=None)
    comm = dial(network, WORKER)
    assert comm.handshake_options is None


@pytest.mark.virtual_time
async def test_a_blocked_host_is_not_dialled_until_it_expires() -> None:
    network = Network(SCHEDULER)
    dialler = network.dialler(retry_direct_s=10.0)
    await dialler.dial(WORKER)
    await dialler.dial(NEIGHBOUR)
    assert network.tried == [WORKER, SCHEDULER, SCHEDULER]
    await asyncio.sleep(10)
    network.reachable.add(WORKER)
    await dialler.dial(WORKER)
    assert network.tried[3:] == [WORKER]


@pytest.mark.virtual_time
async def test_a_dead_worker_does_not_block_its_host() -> None:
    """The scheduler answers at once that it is gone; its host is not remembered as blocked."""
    network = Network(SCHEDULER, NEIGHBOUR, gone=True)
    dialler = network.dialler()
    with pytest.raises(ActorLostError, match="gone") as caught:
        await dialler.dial(WORKER)
    assert not caught.value.begun
    assert network.comms[0].is_aborted
    await dialler.dial(NEIGHBOUR)
    assert network.tried == [WORKER, SCHEDULER, NEIGHBOUR]


def test_a_silent_worker_counts_as_blocked_after_the_timeout() -> None:
    network = Network(SCHEDULER)

    async def main() -> float:
        began = asyncio.get_running_loop().time()
        await network.dialler(direct_timeout_s=1.5).dial(ELSEWHERE)
        return asyncio.get_running_loop().time() - began

    assert run_virtual(main) == pytest.approx(1.5)


@pytest.mark.parametrize(("route", "tried"), [("direct", [WORKER]), ("scheduler", [SCHEDULER])])
def test_a_route_can_be_forced(route: str, tried: list[str]) -> None:
    network = Network(SCHEDULER, WORKER)
    dial(network, WORKER, route=route)
    assert network.tried == tried


def test_without_a_supervisor_the_worker_is_lost() -> None:
    network = Network(SCHEDULER)
    network.answer = None
    with pytest.raises(ActorLostError, match="No daskserve instance"):
        dial(network, WORKER)


def test_if_no_host_was_ever_reached_one_blocked_host_blocks_all() -> None:
    memory = RouteMemory(10)
    memory.blocked("a", now=0)
    assert memory.is_blocked("a", now=9)
    assert memory.is_blocked("b", now=9)
    assert not memory.is_blocked("b", now=10)
    memory.reached("c")
    assert not memory.is_blocked("b", now=9)
    assert memory.is_blocked("a", now=9)
    memory.reached("a")
    assert not memory.is_blocked("a", now=9)


def test_expired_entries_are_forgotten() -> None:
    memory = RouteMemory(10)
    for number in range(100):
        memory.blocked(f"host-{number}", now=number * 11)
    assert len(memory._blocked_until) == 1


def test_settings_come_from_the_dask_configuration() -> None:
    with dask.config.set({"daskserve.channel": {"route": "scheduler", "retry-direct-s": 5}}):
        assert settings.channel() == ChannelSettings(route="scheduler", retry_direct_s=5)
    with dask.config.set({"daskserve.channel.route": "tunnel"}):
        with pytest.raises(ValueError, match="'tunnel'; set it to auto, direct or scheduler"):
            settings.channel()
    for seconds in (2.9, -1, float("nan")):
        with dask.config.set({"daskserve.channel.lost-after-s": seconds}):
            with pytest.raises(ValueError, match=f"lost-after-s: {seconds}; set it to at least 3, or to 0"):
                settings.channel()
    with dask.config.set({"daskserve.channel.lost-after-s": 0}):
        assert settings.channel().lost_after_s == 0
    for given, found in ((5, 5), ("2 MiB", 2 << 20)):
        with dask.config.set({"daskserve.controller.history-bytes": given}):
            assert settings.controller().history_bytes == found
    for wrong in ("much", True, None, [1]):
        with dask.config.set({"daskserve.controller.history-bytes": wrong}):
            with pytest.raises(ValueError, match=r"history-bytes: .*; set it to a number, such as 1000000"):
                settings.controller()


@pytest.mark.virtual_time
async def test_a_silent_machine_is_reached_through_the_scheduler_without_another_try() -> None:
    network = Network(SCHEDULER, WORKER)
    dialler = network.dialler()
    assert not (await dialler.dial(WORKER)).is_relayed
    dialler.note_silence(WORKER)
    assert (await dialler.dial(NEIGHBOUR)).is_relayed
    assert network.tried == [WORKER, SCHEDULER]
    assert not (await dialler.dial_directly(WORKER)).is_relayed
    await dialler.dial(WORKER)
    assert network.tried[2:] == [WORKER, WORKER], "its host is reached again"


def test_workers_take_the_direct_route_or_else_that_through_the_scheduler() -> None:
    for route, of_worker in (("auto", "auto"), ("scheduler", "auto"), ("direct", "direct")):
        with dask.config.set({"daskserve.channel.route": route}):
            assert settings.worker_channel().route == of_worker
    with dask.config.set({"daskserve.channel.retry-direct-s": 5}):
        assert settings.worker_channel().retry_direct_s == 5
    assert settings.worker_channel().retry_direct_s == settings.WORKER_RETRY_S


@pytest.mark.virtual_time
@pytest.mark.parametrize("route", ["direct", "scheduler"])
async def test_a_process_asks_for_the_secret_once(route: str) -> None:
    network = Network(SCHEDULER, WORKER, NEIGHBOUR)
    dialler = network.dialler(route=route)
    assert network.asked == 0
    await dialler.dial(WORKER)
    await dialler.dial(NEIGHBOUR)
    await dialler.dial_directly(WORKER)
    assert network.asked == 1


@pytest.mark.virtual_time
@pytest.mark.parametrize("route", ["direct", "scheduler"])
async def test_a_worker_that_joined_another_scheduler_is_reached_with_the_new_secret(route: str) -> None:
    """The scheduler was replaced, and the worker is new; this process knows only the old secret."""
    network = Network(SCHEDULER, WORKER)
    dialler = network.dialler(route=route)
    await dialler.dial(WORKER)
    network.secret, network.keyring = ChannelSecret(), Keyring()
    network.keyring.add(network.secret)
    for _ in range(2):
        await dialler.dial(WORKER)
    await dialler.dial_directly(WORKER)
    assert network.asked == 2
    assert network.tried.count({"direct": WORKER, "scheduler": SCHEDULER}[route]) >= 4


@pytest.mark.virtual_time
async def test_a_process_that_has_another_scheduler_is_not_refused_as_a_stranger() -> None:
    network = Network(SCHEDULER, WORKER)
    dialler = network.dialler()
    await dialler.dial(WORKER)
    # The next scheduler has no supervisor yet, but the worker has not changed.
    network.is_supervised = False
    await network.known.resume()
    await dialler.dial(WORKER)
    network.is_supervised = True
    network.secret, network.keyring = ChannelSecret(), Keyring()
    network.keyring.add(network.secret)
    await dialler.dial(WORKER)
    assert [comm.is_aborted for comm in network.comms] == [False] * 3
    await dialler.dial(WORKER)
    assert network.asked == 3


def test_a_worker_of_another_cluster_is_lost() -> None:
    """It has taken over the address. The route through the scheduler leads to the same worker."""
    network = Network(SCHEDULER, WORKER)
    network.keyring = Keyring()
    with pytest.raises(UntrustedPeerError, match="belongs to another cluster") as caught:
        dial(network, WORKER)
    assert not caught.value.begun
    assert (network.tried, network.asked) == ([WORKER], 2)
    assert network.comms[0].is_aborted


def test_without_a_supervisor_there_is_no_secret() -> None:
    network = Network(SCHEDULER, WORKER)
    network.is_supervised = False
    with pytest.raises(ActorLostError, match="No daskserve instance") as caught:
        dial(network, WORKER)
    assert not caught.value.begun
    assert network.tried == []
