"""Verbs: marked with a decorator, and found in an actor and its parts."""

from __future__ import annotations

import asyncio

from daskserve.cluster.protocols.base import verb, verbs_of


class Part:
    @verb
    async def ask(self) -> str:
        return "asked"

    async def hidden(self) -> str:
        return "hidden"

    @property
    def unready(self) -> str:
        raise RuntimeError("read too early")


class Special(Part):
    async def ask(self) -> str:
        return "asked of the special one"

    @verb
    async def tell(self) -> str:
        return "told"


def test_marked_methods_are_verbs() -> None:
    assert set(verbs_of(Part())) == {"ask"}


def test_an_overridden_verb_is_the_method_of_the_subclass() -> None:
    verbs = verbs_of(Special())
    assert set(verbs) == {"ask", "tell"}
    assert asyncio.run(verbs["ask"]()) == "asked of the special one"


def test_an_actor_has_the_verbs_of_its_parts() -> None:
    class Other:
        @verb
        async def look(self) -> str:
            return "seen"

    assert set(verbs_of(Part(), Other())) == {"ask", "look"}
