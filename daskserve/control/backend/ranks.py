"""Ranks: the numbers by which the replicas of a backend divide work. Pure.

A replica gets the lowest free numbers when it is placed and keeps them while it lives. There are gaps only
while replicas start or are replaced. Once all wanted replicas are placed, replicas whose numbers are too high
get the free ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from daskserve.common.types import RankInfo, ReplicaState
from daskserve.control.observed.lifecycle import PLACED_STATES
from daskserve.control.observed.observed import Observed
from daskserve.control.records.bundles import is_on
from daskserve.control.records.records import BackendRecord, ReplicaRecord


def ranks_to_change(
    backend: BackendRecord, replicas: Iterable[ReplicaRecord], observed: Observed
) -> list[tuple[ReplicaRecord, tuple[int, ...]]]:
    """Return the replicas of a backend whose rank changes, each with its new numbers."""
    placed = [each for each in replicas if each.state in PLACED_STATES]
    leaving = observed.retiring_of(placed)
    is_settled = len(placed) == backend.version_replicas and all(
        each.version == backend.version and not is_on(each, leaving) for each in placed
    )
    hosts = [observed.host_of(each.worker or "") for each in placed]
    if are_valid([each.rank for each in placed], hosts, is_settled=is_settled):
        return []  # the usual case, checked first because it halves the time of most steps
    return [
        (each, rank)
        for each, rank in zip(placed, new_ranks(placed, hosts, is_settled=is_settled), strict=True)
        if rank != each.rank
    ]


def are_valid(ranks: Sequence[tuple[int, ...]], hosts: Sequence[str], *, is_settled: bool) -> bool:
    """Return whether `new_ranks` changes none of these ranks, given the host of each."""
    if not all(ranks):
        return False
    if len(ranks) == 1:
        return not is_settled or ranks[0] == (0, 0, 0)
    sizes = Counter(hosts)
    node_ranks = {(host, rank[1]) for host, rank in zip(hosts, ranks, strict=True)}
    return (
        len({rank[0] for rank in ranks}) == len(ranks)
        and len(node_ranks) == len({number for _, number in node_ranks}) == len(sizes)
        and len({(host, rank[2]) for host, rank in zip(hosts, ranks, strict=True)}) == len(ranks)
        and (
            not is_settled
            or all(
                rank[0] < len(ranks) and rank[1] < len(sizes) and rank[2] < sizes[host]
                for host, rank in zip(hosts, ranks, strict=True)
            )
        )
    )


def new_ranks(
    replicas: Sequence[ReplicaRecord], hosts: Sequence[str], *, is_settled: bool
) -> Iterator[tuple[int, ...]]:
    """Return the ranks of placed replicas, given the host of each.

    Parameters
    ----------
    is_settled : bool
        Whether these are all wanted replicas, so that no number may be too high.
    """
    on_hosts: dict[str, list[int]] = {}
    for n, host in enumerate(hosts):
        on_hosts.setdefault(host, []).append(n)

    def numbers(part: int, groups: Iterable[Sequence[int]]) -> list[int]:
        known = ([replicas[n].rank[part] for n in group if replicas[n].rank] for group in groups)
        return _numbers([each[0] if each else None for each in known], is_settled)

    singles = [[n] for n in range(len(replicas))]
    node_ranks = dict(zip(on_hosts, numbers(1, on_hosts.values()), strict=True))
    local_ranks = {
        n: local
        for here in on_hosts.values()
        for n, local in zip(here, numbers(2, [[n] for n in here]), strict=True)
    }
    for n, (rank, host) in enumerate(zip(numbers(0, singles), hosts, strict=True)):
        yield rank, node_ranks[host], local_ranks[n]


def _numbers(current: Sequence[int | None], is_settled: bool) -> list[int]:
    """Return distinct numbers: the current ones where possible, otherwise the lowest free ones."""
    places: dict[int, int] = {}
    for place, number in enumerate(current):
        if number is not None and (number < len(current) or not is_settled):
            places.setdefault(number, place)
    kept = {place: number for number, place in places.items()}
    free = (number for number in itertools.count() if number not in places)
    return [kept[place] if place in kept else next(free) for place in range(len(current))]


def rank_info_of(backend: BackendRecord, replica: ReplicaRecord) -> RankInfo | None:
    """Return the rank and the number of replicas to send to a replica; None before it has a rank."""
    if len(replica.rank) != 3:
        return None
    rank, node_rank, local_rank = replica.rank
    return rank, node_rank, local_rank, backend.version_replicas


def all_ranks_known(backend: BackendRecord, replicas: Iterable[ReplicaRecord], observed: Observed) -> bool:
    """Return whether all replicas of a backend run with correct ranks, as far as known."""
    return not any(has_wrong_rank_info(backend, each, observed) for each in replicas)


def has_wrong_rank_info(backend: BackendRecord, replica: ReplicaRecord, observed: Observed) -> bool:
    """Return whether a replica is known to run with a wrong rank or number of replicas.

    Replicas of older versions do not count, because they stop soon.
    """
    known = observed.rank_infos.get(replica.tag)
    is_current = replica.state is ReplicaState.RUNNING and replica.version == backend.version
    return is_current and known is not None and known != rank_info_of(backend, replica)
