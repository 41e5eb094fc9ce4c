"""The topics of ended instances leave the scheduler, however late the last listener unsubscribes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.broker import Broker
from distributed.core import Status

from daskserve.cluster.scheduler.topics import SWEEP_S, EndedTopics

pytestmark = pytest.mark.virtual_time


OURS = "daskserve/shop"


class Site:
    """A scheduler with the topic of an instance, and one of a Dask plugin."""

    def __init__(self) -> None:
        self.running = {"shop"}
        self.scheduler: Any = SimpleNamespace(
            plugins={}, clients={"program": None}, status=Status.running, send_all=lambda *_, **__: None
        )
        self.broker = self.scheduler._broker = Broker(100, self.scheduler)
        self.topics = EndedTopics(self.scheduler, self.running.__contains__)
        for topic in (OURS, "other"):
            self.broker.publish(topic, {"kind": "news"})

    @property
    def names(self) -> set[str]:
        return set(self.broker._topics)


@pytest.fixture
def site() -> Site:
    return Site()


async def test_only_the_topics_of_ended_instances_are_removed(site: Site) -> None:
    site.topics.sweep()
    assert site.names == {OURS, "other"}
    site.running.clear()
    site.topics.sweep()
    assert site.names == {"other"}


async def test_a_topic_is_removed_once_its_last_listener_has_unsubscribed(site: Site) -> None:
    site.broker.subscribe(OURS, "program")
    site.running.clear()
    site.topics.sweep()
    await asyncio.sleep(100 * SWEEP_S)
    assert OURS in site.names, "an unsubscription would create it again"
    site.broker.unsubscribe(OURS, "program")
    await asyncio.sleep(SWEEP_S)
    assert site.names == {"other"}


async def test_a_listener_that_disconnected_does_not_keep_a_topic(site: Site) -> None:
    site.broker.subscribe(OURS, "program")
    site.running.clear()
    site.topics.sweep()
    site.scheduler.clients.clear()
    await asyncio.sleep(SWEEP_S)
    assert site.names == {"other"}


async def test_a_late_message_does_not_leave_a_topic(site: Site) -> None:
    site.running.clear()
    site.topics.sweep()
    for _ in range(3):
        site.broker.publish(OURS, {"kind": "news"})
        await asyncio.sleep(SWEEP_S)
        assert site.names == {"other"}


async def test_the_topic_of_a_restarted_instance_stays(site: Site) -> None:
    site.broker.subscribe(OURS, "program")
    site.running.clear()
    site.topics.sweep()
    site.running.add("shop")
    await asyncio.sleep(3 * SWEEP_S)
    assert site.broker._topics[OURS].subscribers == {"program"}


async def test_a_closed_scheduler_is_not_swept_again(site: Site) -> None:
    site.broker.subscribe(OURS, "program")
    site.running.clear()
    site.scheduler.status = Status.closed
    site.topics.sweep()
    site.broker.unsubscribe(OURS, "program")
    await asyncio.sleep(3 * SWEEP_S)
    assert OURS in site.names
