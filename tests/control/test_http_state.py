"""The workers and ports of proxies, and their changes when workers join and leave."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from control_harness import backend, replica, worker
from tables import each_case

from daskserve.common.types import Location, WorkerInfo
from daskserve.control.observed.observed import Observed
from daskserve.control.proxies.step import HttpStep, ProxyRules, StartProxy, StopProxy, held_workers, step
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.state import State

#: Two hosts; the scheduler runs on the first.
HEAD_1, HEAD_2 = worker(1, is_head=True), worker(2, is_head=True)
FAR_3, FAR_4 = worker(3, host="h2"), worker(4, host="h2")
ALL = (HEAD_1, HEAD_2, FAR_3, FAR_4)


GRACE_S = 10.0


def is_idle(taken: HttpStep) -> bool:
    return not taken.change and not taken.actions


class Proxies:
    """The proxies' state machine, on a cluster that the test controls."""

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
        self.start_id = "first"
        self.now = 0.0
        self.state = State()
        self.observed = Observed(workers={each.address: each for each in workers})
        self._incarnation = 0

    def step(self) -> HttpStep:
        taken = step(
            self.state,
            self.observed,
            ProxyRules(self.location, self.port, self.avoid, GRACE_S, self.start_id),
            incarnation=self._incarnation,
            now=self.now,
        )
        self._incarnation = taken.incarnation
        self.state.apply(taken.change)
        self.observed.learn_proxies(taken.lost, taken.apart)
        self.observed.lost_workers &= self.state.workers_in_use()
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
                else:
                    self.observed.proxies_gone.add(action.proxy.tag)
            if not taken.change and not taken.actions:
                return
        raise AssertionError("the proxies do not settle")

    def retire(self, address: str) -> None:
        known = self.observed.workers[address]
        self.observed.workers[address] = replace(known, is_retiring=True, is_available=False)

    def join(self, info: WorkerInfo) -> None:
        self.observed.workers[info.address] = info

    def lose(self, address: str) -> None:
        self.observed.lost_workers.add(address)
        del self.observed.workers[address]

    @property
    def workers(self) -> list[str | None]:
        return sorted((each.worker for each in self.state.proxies.values()), key=str)

    @property
    def leaving(self) -> list[str | None]:
        return [each.worker for each in self.state.proxies.values() if each.is_leaving]

    @property
    def head(self) -> ProxyRecord:
        return self.state.proxies["head"]


def starts(taken: HttpStep) -> list[ProxyRecord]:
    return [each.proxy for each in taken.actions if isinstance(each, StartProxy)]


def stops(taken: HttpStep) -> list[str | None]:
    return sorted((each.proxy.worker for each in taken.actions if isinstance(each, StopProxy)), key=str)


@each_case(
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
    record = ProxyRecord("head", "w1", "h1", incarnation=1, port=8000, start_id="first")
    assert (taken.change, taken.actions) == ({"proxy/head": record}, [StartProxy(record)])
    taken = proxies.step()  # repeated until it answers
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


@each_case("location", [Location.HEAD_ONLY, Location.EVERY_NODE])
@each_case("port", [8000, 0])
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


@each_case("location", [Location.HEAD_ONLY, Location.EVERY_NODE, Location.EVERY_WORKER])
def test_the_port_outlives_the_loss_of_all_workers(location: Location) -> None:
    """As in a restart of the cluster. The port was free at first, and clients know it."""
    proxies = Proxies(location, [HEAD_1], port=0)
    proxies.settle()
    (before,) = proxies.state.proxies.values()
    proxies.lose("w1")
    assert starts(proxies.step()) == []
    proxies.now += 10 * GRACE_S
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
    proxies.step()
    proxies.now += GRACE_S
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


@each_case("port", [8000, 0])
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
    """The same address belongs to a lost and a present worker, which must not be confused."""
    proxies = Proxies(Location.HEAD_ONLY, [HEAD_1])
    proxies.settle()
    proxies.observed.lost_workers.add("w1")
    taken = proxies.step()
    assert (taken.change, taken.actions) == ({"proxy/head": proxies.head}, [])
    assert (proxies.head.worker, proxies.observed.lost_workers) == (None, set())
    proxies.settle()
    (record,) = proxies.state.proxies.values()
    assert (record.worker, record.incarnation) == ("w1", 2)


def test_unneeded_proxies_stop() -> None:
    proxies = Proxies(Location.EVERY_WORKER)
    proxies.settle()
    proxies.location = Location.NO_SERVER
    assert stops(proxies.step()) == ["w1", "w2", "w3", "w4"]
    proxies.settle()
    assert proxies.state.proxies == {}


# ---- a worker retires


@each_case("location", [Location.HEAD_ONLY, Location.EVERY_NODE])
@each_case("port", [8000, 0])
def test_a_successor_listens_before_the_proxy_of_a_retiring_worker_stops(
    location: Location, port: int
) -> None:
    proxies = Proxies(location, [HEAD_1, HEAD_2], port=port)
    proxies.state.apply({"backend/b": backend(config={"graceful_shutdown_timeout_s": 30})})
    proxies.settle()
    (before,) = proxies.state.proxies.values()
    proxies.retire("w1")
    taken = proxies.step()
    (start,) = starts(taken)
    assert (start.worker, start.port, stops(taken)) == ("w2", before.port, [])
    assert stops(proxies.step()) == []
    proxies.listen(start)
    (stop,) = proxies.step().actions
    assert stop == StopProxy(replace(before, is_leaving=True), grace_s=30)
    assert proxies.state.workers_in_use() == {"w1", "w2"}, "it counts until it has ended"
    assert stops(proxies.step()) == ["w1"], "it is told again until it has ended"
    proxies.observed.proxies_gone.add(stop.proxy.tag)
    assert proxies.step().change == {stop.proxy.key: None}
    assert proxies.workers == ["w2"]


def test_a_new_controller_finishes_what_an_earlier_one_began() -> None:
    proxies = Proxies(Location.HEAD_ONLY)
    proxies.settle()
    proxies.retire("w1")
    (start,) = starts(proxies.step())
    proxies.observed.proxies_ready.clear()
    taken = proxies.step()
    assert (starts(taken), stops(taken)) == ([start], [])
    proxies.listen(start)
    assert stops(proxies.step()) == ["w1"]


def test_a_leaving_proxy_whose_worker_is_lost_has_ended() -> None:
    proxies = Proxies(Location.HEAD_ONLY)
    proxies.settle()
    proxies.retire("w1")
    proxies.step()
    proxies.lose("w1")
    proxies.settle()
    assert proxies.workers == ["w2"]
    assert proxies.observed.lost_workers == set()


def test_where_every_worker_has_a_proxy_the_others_of_the_host_are_the_successors() -> None:
    proxies = Proxies(Location.EVERY_WORKER)
    proxies.settle()
    proxies.retire("w1")
    assert stops(proxies.step()) == ["w1"]
    proxies.settle()
    assert proxies.workers == ["w2", "w3", "w4"]
    proxies.join(worker(5, host="h2"))
    (start,) = starts(proxies.step())
    proxies.retire("w3")
    proxies.retire("w4")
    assert stops(proxies.step()) == [], "the other proxy of the host does not listen yet"
    proxies.listen(start)
    assert stops(proxies.step()) == ["w3", "w4"]
    proxies.settle()
    proxies.retire("w2")
    assert stops(proxies.step()) == ["w2"], "its host has no other worker"


def test_without_another_worker_a_proxy_serves_as_long_as_the_replicas_beside_it() -> None:
    proxies = Proxies(Location.HEAD_ONLY, [HEAD_1])
    proxies.state.apply({"replica/b#1": replica("b#1", worker="w1")})
    proxies.settle()
    proxies.retire("w1")
    assert stops(proxies.step()) == []
    proxies.join(HEAD_2)
    taken = proxies.step()
    assert stops(taken) == []
    proxies.listen(*starts(taken))
    assert stops(proxies.step()) == ["w1"]


@each_case("location", [Location.HEAD_ONLY, Location.EVERY_NODE, Location.EVERY_WORKER])
def test_the_address_outlives_the_last_worker_at_the_end_of_its_lifetime(location: Location) -> None:
    proxies = Proxies(location, [HEAD_1], port=0)
    proxies.settle()
    (before,) = proxies.state.proxies.values()
    proxies.retire("w1")
    assert stops(proxies.step()) == ["w1"]
    proxies.settle()
    proxies.lose("w1")
    proxies.step()
    proxies.join(HEAD_2)
    (start,) = starts(proxies.step())
    assert (start.worker, start.port, start.home) == ("w2", before.port, "")
    assert proxies.workers == ["w2"]


def test_a_proxy_alone_keeps_no_worker_unless_clients_know_its_address() -> None:
    for location, held in (
        (Location.HEAD_ONLY, {"w1", "w4"}),
        (Location.EVERY_NODE, {"w4"}),
        (Location.EVERY_WORKER, {"w4"}),
    ):
        proxies = Proxies(location)
        proxies.settle()
        proxies.state.apply({"replica/b#1": replica("b#1", worker="w4")})
        assert held_workers(proxies.state, location) == held
    proxies = Proxies(Location.HEAD_ONLY)
    proxies.settle()
    proxies.retire("w1")
    proxies.step()
    assert held_workers(proxies.state, Location.HEAD_ONLY) == {"w2"}


# ---- the host of the only proxy


@each_case("port", [8000, 0])
def test_the_only_proxy_comes_back_on_its_host_where_that_comes_back(port: int) -> None:
    proxies = Proxies(Location.HEAD_ONLY, [HEAD_1, FAR_3, FAR_4], port=port)
    proxies.settle()
    before = proxies.head
    proxies.lose("w1")
    taken = proxies.step()
    assert (starts(taken), taken.wake_at) == ([], GRACE_S)
    assert proxies.state.workers_in_use() == set()
    proxies.now += GRACE_S / 2
    assert is_idle(proxies.step())
    proxies.join(worker(5, is_head=True))
    taken = proxies.step()
    (start,) = starts(taken)
    assert (start.worker, start.host, start.port) == ("w5", "h1", before.port)
    assert (start.home, taken.messages) == ("", [])


@each_case("port", [8000, 0])
def test_the_only_proxy_moves_after_the_grace_period_and_back_when_its_host_lasts(port: int) -> None:
    proxies = Proxies(Location.HEAD_ONLY, [HEAD_1, FAR_3], port=port)
    proxies.settle()
    before = proxies.head
    proxies.lose("w1")
    proxies.step()
    proxies.now += GRACE_S
    taken = proxies.step()
    (away,) = starts(taken)
    assert (away.worker, away.home, away.home_port) == ("w3", "h1", before.port)
    assert taken.messages == [
        "Proxy head moves from host h1, which has no worker for it, to host h2; it moves back once host h1 "
        "has one"
    ]
    proxies.settle()
    for _ in range(3):  # a worker that ends repeatedly
        proxies.join(HEAD_1)
        assert is_idle(proxies.step())
        proxies.now += GRACE_S / 2
        assert is_idle(proxies.step())
        proxies.lose("w1")
        assert is_idle(proxies.step())
        proxies.now += GRACE_S
    proxies.join(HEAD_1)
    assert proxies.step().wake_at == proxies.now + GRACE_S
    proxies.now += GRACE_S
    taken = proxies.step()
    (back,) = starts(taken)
    assert (back.worker, back.port, back.home, stops(taken)) == ("w1", before.port, "", [])
    assert taken.messages == ["Proxy head moves back from host h2 to host h1"]
    proxies.listen(back)
    assert stops(proxies.step()) == ["w3"]
    proxies.settle()
    assert proxies.workers == ["w1"]


def test_the_proxy_that_moved_serves_until_the_one_at_home_listens() -> None:
    proxies = Proxies(Location.HEAD_ONLY, [HEAD_1, FAR_3])
    proxies.settle()
    proxies.lose("w1")
    proxies.step()
    proxies.now += GRACE_S
    proxies.settle()
    proxies.join(HEAD_1)
    proxies.step()
    proxies.now += GRACE_S
    assert [each.worker for each in starts(proxies.step())] == ["w1"]
    proxies.lose("w1")
    assert stops(proxies.step()) == []
    assert (proxies.head.worker, proxies.leaving) == (None, ["w3"])


def test_the_only_proxy_leaves_a_host_that_retires_at_once() -> None:
    proxies = Proxies(Location.HEAD_ONLY, [HEAD_1, FAR_3])
    proxies.settle()
    proxies.retire("w1")
    (start,) = starts(proxies.step())
    assert (start.worker, start.home) == ("w3", "h1")


def test_hosts_of_another_cluster_are_not_waited_for() -> None:
    proxies = Proxies(Location.HEAD_ONLY, [HEAD_1])
    proxies.settle()
    proxies.observed = Observed(workers={"w3": FAR_3}, lost_workers={"w1"})
    proxies.start_id = "second"
    (start,) = starts(proxies.step())
    assert (start.worker, start.home) == ("w3", "h1")


@each_case("location", [Location.HEAD_ONLY, Location.EVERY_NODE, Location.EVERY_WORKER])
def test_a_start_with_another_port_on_the_same_workers_replaces_the_proxies(location: Location) -> None:
    """The records of the instance's store have the port of the start before."""
    proxies = Proxies(location, [HEAD_1, FAR_3])
    proxies.settle()
    workers = proxies.workers
    proxies.start_id, proxies.port = "second", 9000
    proxies.settle()
    assert {each.port for each in proxies.state.proxies.values()} == {9000}
    assert proxies.workers == workers
    proxies.port = 0
    assert not proxies.step().change


def test_an_automatic_port_is_kept_on_another_cluster_only_if_it_is_free() -> None:
    for port in (0, 8000):
        proxies = Proxies(Location.EVERY_WORKER, [HEAD_1, HEAD_2], port=port)
        proxies.settle()
        used = {each.port for each in proxies.state.proxies.values()}
        proxies.start_id = "second"
        proxies.observed = Observed(workers={"w5": worker(5), "w6": worker(6)}, lost_workers={"w1", "w2"})
        found = [each for each in starts(proxies.step()) if each.worker == "w5"]
        proxies.settle()
        assert {each.port for each in found} == used
        assert [each.may_move for each in found] == [not port]


def test_the_automatic_port_of_a_host_outlives_its_last_worker_for_the_grace_period() -> None:
    for location in (Location.EVERY_NODE, Location.EVERY_WORKER):
        proxies = Proxies(location, [HEAD_1, FAR_3], port=0)
        proxies.settle()
        port = next(each.port for each in proxies.state.proxies.values() if each.host == "h2")
        proxies.lose("w3")
        proxies.step()
        proxies.now += GRACE_S / 2
        proxies.join(FAR_4)
        (start,) = starts(proxies.step())
        assert (start.worker, start.port) == ("w4", port)
        proxies.settle()
        assert proxies.workers == ["w1", "w4"]
        proxies.lose("w4")
        proxies.step()
        proxies.now += GRACE_S
        proxies.settle()
        assert proxies.workers == ["w1"]


# ---- a worker that does not answer


def test_a_hanging_worker_keeps_its_proxy_where_nothing_else_would_take_its_place() -> None:
    for location in (Location.EVERY_NODE, Location.EVERY_WORKER):
        proxies = Proxies(location, [HEAD_1, FAR_3])
        proxies.settle()
        proxies.observed.unresponsive.add("w3")
        assert is_idle(proxies.step())
        proxies.observed.unresponsive.clear()
        assert is_idle(proxies.step())
        proxies.observed.unresponsive.add("w3")
        proxies.retire("w3")
        assert stops(proxies.step()) == ["w3"], "its end is not waited for"


def test_the_proxy_of_a_hanging_worker_moves_within_its_host_at_once_and_elsewhere_after_the_grace() -> None:
    proxies = Proxies(Location.HEAD_ONLY)
    proxies.settle()
    proxies.observed.unresponsive.add("w1")
    (start,) = starts(proxies.step())
    assert (start.worker, start.port) == ("w2", 8000)
    proxies.listen(start)
    assert stops(proxies.step()) == ["w1"]

    proxies = Proxies(Location.HEAD_ONLY, [HEAD_1, FAR_3])
    proxies.settle()
    proxies.observed.unresponsive.add("w1")
    assert is_idle(proxies.step())
    proxies.now += GRACE_S
    assert [each.worker for each in starts(proxies.step())] == ["w3"]
    assert proxies.leaving == ["w1"]


def test_the_proxies_of_an_earlier_controller_are_found_before_others_start_beside_them() -> None:
    """Only the first proxy of a host requires that the port is free."""
    proxies = Proxies(Location.EVERY_WORKER, [HEAD_2])
    proxies.settle()
    proxies.observed.proxies_ready.clear()
    proxies.observed.workers = {"w1": HEAD_1, "w2": HEAD_2}
    assert [each.worker for each in starts(proxies.step())] == ["w2"]


@each_case("location", [Location.HEAD_ONLY, Location.EVERY_NODE, Location.EVERY_WORKER])
def test_proxies_run_on_the_workers_that_are_kept_for_them(location: Location) -> None:
    kept = replace(FAR_4, is_system=True)
    proxies = Proxies(location, [HEAD_1, HEAD_2, FAR_3, kept])
    proxies.step()
    assert {each.worker for each in proxies.state.proxies.values()} == {"w4"}


def test_proxies_run_elsewhere_while_the_workers_that_are_kept_for_them_are_gone() -> None:
    def workers() -> set[str | None]:
        proxies.step()
        found = proxies.state.proxies.values()
        return {each.worker for each in found if not getattr(each, "is_leaving", False)}

    proxies = Proxies(Location.EVERY_WORKER, [HEAD_1, HEAD_2])
    assert workers() == {"w1", "w2"}
    proxies.observed.workers["w4"] = replace(FAR_4, is_system=True)
    assert workers() == {"w4"}
    del proxies.observed.workers["w4"]
    proxies.observed.lost_workers.add("w4")
    assert workers() == {"w1", "w2"}
