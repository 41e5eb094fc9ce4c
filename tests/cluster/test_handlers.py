"""The functions that a Dask server calls for other processes, and its references to them."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

from distributed.core import _expects_comm

from daskserve.cluster.dask.handlers import add_handler, remove_handler, replace_method, restore_method


class Host:
    """An object with handlers."""

    def accept(self, comm: str, by: str) -> tuple[str, str]:
        return comm, by

    def ask(self, *, verb: str) -> str:
        return verb


def test_a_handler_gets_what_it_expects_until_it_is_removed() -> None:
    server: Any = SimpleNamespace(handlers={})
    host = Host()
    add_handler(server, "accept", host.accept)
    add_handler(server, "ask", host.ask)
    assert [_expects_comm(each) for each in server.handlers.values()] == [True, False]
    assert server.handlers["accept"]("comm", by="me") == ("comm", "me")
    assert server.handlers["ask"](verb="ping") == "ping"
    for _ in range(2):
        remove_handler(server, "accept")
        remove_handler(server, "ask")
    assert not server.handlers


def test_dask_keeps_nothing_of_a_handler_that_was_removed() -> None:
    """Dask's cache of signatures keeps every function that Dask has called."""
    server: Any = SimpleNamespace(handlers={})
    hosts, sizes = [], set()
    for _ in range(3):
        host = Host()
        hosts.append(weakref.ref(host))
        add_handler(server, "accept", host.accept)
        assert _expects_comm(server.handlers["accept"])
        remove_handler(server, "accept")
        sizes.add(_expects_comm.cache_info().currsize)
        del host
    gc.collect()
    assert [each() for each in hosts] == [None, None, None]
    assert len(sizes) == 1


def test_a_replaced_method_answers_local_and_remote_calls_until_it_is_restored() -> None:
    class Scheduler:
        def __init__(self) -> None:
            self.handlers = {"a": self.a, "b": self.b}

        def a(self) -> str:
            return "a"

        def b(self) -> str:
            return "b"

    scheduler: Any = Scheduler()
    originals = {
        "a": replace_method(scheduler, "a", lambda: "new a"),
        "b": replace_method(scheduler, "b", lambda: "new b", handler=lambda: "remote b"),
    }
    assert {name: original() for name, original in originals.items()} == {"a": "a", "b": "b"}
    assert (scheduler.a(), scheduler.handlers["a"]()) == ("new a", "new a")
    assert (scheduler.b(), scheduler.handlers["b"]()) == ("new b", "remote b")
    for name, original in originals.items():
        restore_method(scheduler, name, original)
    assert (scheduler.a(), scheduler.handlers["a"]()) == ("a", "a")
    assert (scheduler.b(), scheduler.handlers["b"]()) == ("b", "b")
