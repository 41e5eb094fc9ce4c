"""Verbs: declared where they are defined, found in an actor and in its parts."""

from __future__ import annotations

import asyncio

from daskserve.cluster.base import verb, verbs_of


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


def test_verbs_are_the_methods_that_say_so() -> None:
    assert set(verbs_of(Part())) == {"ask"}


def test_an_inherited_verb_is_the_method_of_the_subclass() -> None:
    verbs = verbs_of(Special())
    assert set(verbs) == {"ask", "tell"}
    assert asyncio.run(verbs["ask"]()) == "asked of the special one"


def test_the_verbs_of_parts_are_the_verbs_of_the_whole() -> None:
    class Other:
        @verb
        async def look(self) -> str:
            return "seen"

    assert set(verbs_of(Part(), Other())) == {"ask", "look"}
