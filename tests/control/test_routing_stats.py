"""Routing statistics of replicas, as they are published to routers."""

from __future__ import annotations

from daskserve.control.observed.reports import PublishedReports


def test_only_changes_of_backends_with_a_router_are_published() -> None:
    stats = PublishedReports("stats")
    assert stats.learn("b", "b#1", {"load": 1}, is_used=True)
    assert not stats.learn("c", "c#1", {"load": 1}, is_used=False)
    assert stats.take_changes() == {"stats/b": {"b#1": {"load": 1}}}
    assert not stats.learn("b", "b#1", {"load": 1}, is_used=True)
    assert stats.take_changes() == {}
    stats.learn("b", "b#2", {"load": 2}, is_used=True)
    assert stats.take_changes() == {"stats/b": {"b#1": {"load": 1}, "b#2": {"load": 2}}}
    assert stats.get("c#1") == {"load": 1}
    for tag in ("b#1", "b#2", "c#1"):
        stats.forget_replica(tag)
    assert stats.take_changes() == {"stats/b": None}  # the key is removed with the last replica
