"""Which proxy runs where, on which port, and what follows when workers come and go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from control_harness import replica, worker

from daskserve.control.http_state import HttpStep, StartProxy, StopProxy, step
from daskserve.control.observed import Observed
from daskserve.control.records import ProxyRecord
from daskserve.control.state import State
from daskserve.types import Location, WorkerInfo

#: Two hosts, the scheduler lives on the first.
HEAD_1, HEAD_2 = worker(1, is_head=True), worker(2, is_head=True)
FAR_3, FAR_4 = worker(3, host="h2"), worker(4, host="h2")
ALL = (HEAD_1, HEAD_2, FAR_3, FAR_4)


def is_idle(taken: HttpStep) -> bool:
    return not taken.change and not taken.actions


class Proxies:
    """The proxies' state machine with a cluster in the test's hand."""

    def __init__(
        self,
        location: Location | None,
        workers: Iterable[WorkerInfo] = ALL,
        *,
        port: int = 8000,
        avoid: str = "",
    ) -> None:
        self.location = location
        self.port = port
        self.avoid = avoid or None
        self.state = State()
        self.observed = Observed(workers={each.address: each for each in workers})
        self._incarnation = 0

    def step(self) -> HttpStep:
        taken = step(
            self.state,
            self.observed,
            location=self.location,
            port=self.port,
            incarnation=self._incarnation,
            avoid=self.avoid,
        )
        self._incarnation = taken.incarnation
        self.state.apply(taken.change)
        self.observed.forget_proxies(taken.lost)
        self.observed.lost_workers &= set(self.state.workers_in_use())
        return taken

    def listen(self, proxy: ProxyRecord, port: int = 0) -> None:
        """Mark a proxy as ready, on its given port or, if that is 0, on this one."""
        self.state.apply({proxy.key: replace(proxy, port=proxy.port or port)})
        self.observed.proxies_ready[proxy.name] = {"incarnation": proxy.incarnation, "urls": []}

    def settle(self) -> None:
        for number in range(20):
            taken = self.step()
            for action in taken.actions:
                if isinstance(action, StartProxy):
                    self.listen(action.proxy, 40000 + number)
            if not taken.change and not taken.actions:
                return
        raise AssertionError("the proxies do not settle")

    def lose(self, address: str) -> None:
        self.observed.lost_workers.add(address)
        del self.observed.workers[address]

    @property
    def workers(self) -> list[str]:
        return sorted(each.worker for each in self.state.proxies.values())


def starts(taken: HttpStep) -> list[ProxyRecord]:
    return [each.proxy for each in taken.actions if isinstance(each, StartProxy)]


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        (None, []),
        (Location.NO_SERVER, []),
        (Location.HEAD_ONLY, ["w1"]),
        (Location.EVERY_NODE, ["w1", "w3"]),
        (Location.EVERY_WORKER, ["w1", "w2", "w3", "w4"]),
    ],
)
def test_each_location_has_its_workers(location: Location | None, expected: list[str]) -> None:
    proxies = Proxies(location)
    proxies.settle()
    assert proxies.workers == expected


def test_without_workers_nothing_can_listen() -> None:
    for location in Location:
        assert is_idle(Proxies(location, []).step())


def test_the_head_is_anywhere_if_no_worker_lives_on_the_schedulers_host() -> None:
    proxies = Proxies(Location.HEAD_ONLY, [FAR_3, FAR_4])
    proxies.settle()
    assert proxies.workers == ["w3"]


def test_the_controllers_worker_and_busy_workers_come_last_and_paused_ones_very_last() -> None:
    proxies = Proxies(Location.HEAD_ONLY, avoid="w1")
    proxies.settle()
    assert proxies.workers == ["w2"]

    proxies = Proxies(Location.HEAD_ONLY)
    proxies.state.apply({"replica/b#1": replica("b#1", worker="w1")})
    proxies.settle()
    assert proxies.workers == ["w2"]

    proxies = Proxies(Location.HEAD_ONLY, [HEAD_1, replace(HEAD_2, is_available=False)], avoid="w1")
    proxies.settle()
    assert proxies.workers == ["w1"]


def test_a_proxy_is_written_before_it_starts() -> None:
    proxies = Proxies(Location.HEAD_ONLY)
    taken = proxies.step()
    record = ProxyRecord("head", "w1", "h1", incarnation=1, port=8000)
    assert (taken.change, taken.actions) == ({"proxy/head": record}, [StartProxy(record)])
    taken = proxies.step()  # asked again until it answers
    assert (taken.change, taken.actions) == ({}, [StartProxy(record)])
    proxies.listen(record)
    assert is_idle(proxies.step())


def test_a_proxy_stays_where_it_is_while_its_worker_does() -> None:
    proxies = Proxies(Location.HEAD_ONLY, [FAR_3])
    proxies.settle()
    proxies.observed.workers["w1"] = HEAD_1
    proxies.observed.workers["w3"] = replace(FAR_3, is_available=False)
    assert is_idle(proxies.step())


def test_a_new_controller_asks_for_every_proxy_again_with_its_own_incarnation() -> None:
    proxies = Proxies(Location.EVERY_NODE)
    proxies.settle()
    records = list(proxies.state.proxies.values())
    proxies.observed.proxies_ready.clear()
    assert starts(proxies.step()) == records


@pytest.mark.parametrize("location", [Location.HEAD_ONLY, Location.EVERY_NODE])
@pytest.mark.parametrize("port", [8000, 0])
def test_its_replacement_on_the_same_host_keeps_the_port(location: Location, port: int) -> None:
    proxies = Proxies(location, port=port)
    proxies.settle()
    before = proxies.state.proxies["head" if location is Location.HEAD_ONLY else "h1"]
    assert before.port
    proxies.lose("w1")
    (start,) = starts(proxies.step())
    assert (start.worker, start.port) == ("w2", before.port)
    assert start.incarnation > before.incarnation
    assert before.name not in proxies.observed.proxies_ready


@pytest.mark.parametrize("location", [Location.HEAD_ONLY, Location.EVERY_NODE, Location.EVERY_WORKER])
def test_the_port_outlives_the_loss_of_all_workers(location: Location) -> None:
    """As in a restart of the cluster; it was found free once, and clients know it."""
    proxies = Proxies(location, [HEAD_1], port=0)
    proxies.settle()
    (before,) = proxies.state.proxies.values()
    proxies.lose("w1")
    assert is_idle(proxies.step())
    assert is_idle(proxies.step())
    assert proxies.observed.proxies_ready == {}
    proxies.observed.workers["w2"] = HEAD_2
    (start,) = starts(proxies.step())
    assert (start.worker, start.port) == ("w2", before.port)
    assert proxies.workers == ["w2"]
    assert proxies.observed.lost_workers == set()


def test_its_replacement_on_another_host_takes_the_port_that_was_asked_for() -> None:
    proxies = Proxies(Location.HEAD_ONLY, [HEAD_1, FAR_3], port=0)
    proxies.settle()
    assert proxies.state.proxies["head"].port == 40000
    proxies.lose("w1")
    (start,) = starts(proxies.step())
    assert (start.worker, start.port) == ("w3", 0)


def test_the_last_proxy_of_a_host_goes_with_its_last_worker() -> None:
    proxies = Proxies(Location.EVERY_NODE)
    proxies.settle()
    proxies.observed.proxies_failed["h2"] = OSError("old error")
    proxies.lose("w4")
    assert is_idle(proxies.step())
    proxies.lose("w3")
    taken = proxies.step()
    assert (taken.change, taken.actions) == ({"proxy/h2": None}, [])
    assert set(proxies.observed.proxies_ready) == {"h1"}
    assert proxies.observed.proxies_failed == {}


def test_a_host_or_a_worker_that_joins_gets_its_proxy() -> None:
    proxies = Proxies(Location.EVERY_NODE, [HEAD_1])
    proxies.settle()
    proxies.observed.workers["w3"] = FAR_3
    assert [each.worker for each in starts(proxies.step())] == ["w3"]

    proxies = Proxies(Location.EVERY_WORKER, [HEAD_1])
    proxies.settle()
    proxies.observed.workers["w2"] = HEAD_2
    (start,) = starts(proxies.step())
    assert (start.worker, start.port) == ("w2", 8000)


@pytest.mark.parametrize("port", [8000, 0])
def test_the_workers_of_a_host_share_a_port_after_the_first_has_claimed_it(port: int) -> None:
    """The first proxy must find the port free, so no other proxy may start before."""
    proxies = Proxies(Location.EVERY_WORKER, port=port)
    first = starts(proxies.step())
    assert [each.worker for each in first] == ["w1", "w3"]
    assert starts(proxies.step()) == first
    proxies.listen(first[0], 40001)
    second = starts(proxies.step())
    assert [(each.worker, each.port) for each in second] == [("w2", port or 40001), ("w3", port)]
    proxies.listen(first[1], 40002)
    third = starts(proxies.step())
    assert [(each.worker, each.port) for each in third] == [("w2", port or 40001), ("w4", port or 40002)]


def test_a_worker_that_rejoined_before_its_loss_was_observed_gets_one_new_proxy() -> None:
    """Its address is both lost and there; neither may be taken for the other."""
    proxies = Proxies(Location.HEAD_ONLY, [HEAD_1])
    proxies.settle()
    proxies.observed.lost_workers.add("w1")
    taken = proxies.step()
    assert (taken.change, taken.actions) == ({"proxy/head": None}, [])
    assert proxies.observed.lost_workers == set()
    proxies.settle()
    (record,) = proxies.state.proxies.values()
    assert (record.worker, record.incarnation) == ("w1", 2)


def test_unneeded_proxies_stop() -> None:
    proxies = Proxies(Location.EVERY_WORKER)
    proxies.settle()
    proxies.location = Location.NO_SERVER
    taken = proxies.step()
    assert proxies.state.proxies == {}
    assert sorted(each.proxy.worker for each in taken.actions if isinstance(each, StopProxy)) == [
        "w1",
        "w2",
        "w3",
        "w4",
    ]
