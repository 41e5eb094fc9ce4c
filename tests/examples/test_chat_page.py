"""The page of the chat example in a real browser."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chromium import HAS_CHROMIUM, Tab, chromium

import daskserve as serve
from daskserve.openai import GenerationRequest, InvalidRequestError, build_app, text_of
from daskserve.testing import local_instance

EXAMPLE = Path(__file__).parents[2] / "examples" / "chat"
sys.path.insert(0, str(EXAMPLE))

import chat_demo  # noqa: E402 - the example's folder must be in the path first

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not HAS_CHROMIUM, reason="needs Debian's package chromium"),
]

#: The text of the newest answer.
ANSWER = "[...document.querySelectorAll('.assistant')].at(-1).textContent"
BUTTON = "find('button').textContent"


class Counting:
    """An engine that counts to the number in the question; without a number, until its reader leaves."""

    def __init__(self) -> None:
        self._active = 0

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"active": self._active}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[str]:
        said = [text_of(each) for each in request.messages or ()]
        if said[-1] == "what did we say?":
            yield json.dumps(said)
            return
        if said[-1] == "<b>":
            raise InvalidRequestError("I count to <i>numbers</i> only.")
        self._active += 1
        try:
            for number in itertools.count() if said[-1] == "count" else range(int(said[-1])):
                yield f"{number} "
                await asyncio.sleep(0.01)
        finally:
            self._active -= 1


async def say(tab: Tab, text: str) -> None:
    await tab.ask(f"find('text').value = {json.dumps(text)}; find('text').focus()")
    await tab.press("Enter")


async def test_the_page_streams_an_answer_and_its_button_stops_one() -> None:
    html = (EXAMPLE / "page.html").read_text(encoding="utf-8")
    with local_instance(http_options={"port": 0}) as client:
        client.run(build_app({"counting": Counting}), name="openai", route_prefix="/")
        engine = client.get_deployment_handle("counting", "openai")
        client.run(serve.deployment(chat_demo.Page).bind(html), name="page", route_prefix="/chat")
        async with chromium() as tab:
            await tab.open(f"{client.http_urls()[0].rstrip('/')}/chat")
            await tab.until("find('model').value === 'counting'")
            await say(tab, "count")
            # The answer grows while the page reads it.
            await tab.until(f"{ANSWER}.startsWith('0 1 2 ') && {BUTTON} === 'Stop'")
            await tab.ask("find('button').click()")
            facts = await tab.until(f"{BUTTON} === 'Send' && document.querySelector('.facts').textContent")
            assert facts.endswith("stopped by you"), facts
            async with asyncio.timeout(10):
                while (await engine.record_autoscaling_stats.remote())["active"]:  # noqa: ASYNC110 - no event here
                    await asyncio.sleep(0.01)
            stopped = await tab.ask(ANSWER)
            await say(tab, "3")
            await tab.until(f"{ANSWER} === '0 1 2 ' && {BUTTON} === 'Send'")
            facts = await tab.until("document.querySelectorAll('.facts')[1]?.textContent")
            assert facts.startswith("first token "), facts
            assert facts.endswith("stop"), facts
            await say(tab, "<b>")
            assert await tab.until("document.querySelector('.error').textContent") == (
                "I count to <i>numbers</i> only."
            )
            assert await tab.ask("document.querySelectorAll('main b, main i').length") == 0
            await say(tab, "what did we say?")
            said = json.loads(await tab.until(f"{BUTTON} === 'Send' && {ANSWER}.startsWith('[') && {ANSWER}"))
            assert said == ["count", stopped, "3", "0 1 2 ", "<b>", "what did we say?"]
            assert tab.troubles == []
