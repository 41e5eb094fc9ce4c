"""Chat with a small model on a local Dask cluster: ``make demo-chat``.

Starts a cluster, and serves the model behind OpenAI's interface, with a page for chats. With ``--once``, it
asks questions concurrently and one after the other, abandons one answer, prints the measurements, and ends.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import signal
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import chat_engine
import cloudpickle
import ngram
from starlette.requests import Request
from starlette.responses import HTMLResponse

import daskserve as serve
from daskserve.errors import PortInUseError
from daskserve.openai import build_app

HERE = Path(__file__).resolve().parent
PAGES = HERE.parent.parent / "docs"
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MODEL = "small"
QUESTION = "What happens when a worker dies?"
#: Number of concurrent callers: their tokens are more than may wait for one replica.
CALLERS = 200
AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "policy": "custom_metric",
    # Replicas for every 600 tokens that wait for a slot.
    "policy_kwargs": {"metric": "tokens_waiting", "target": 600},
    "upscale_delay_s": 2,
}


class Answer(NamedTuple):
    """The answer to a caller: the text, the time of the first token, and the tokens per second."""

    text: str
    first_token_s: float
    tokens: int


class Page:
    """The page to chat on."""

    def __init__(self, html: str) -> None:
        self._html = html
        script = html.partition("<script>")[2].partition("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        # The browser runs only the page's own script, which may connect only to this server.
        self._policy = (
            f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
            f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    async def __call__(self, request: Request) -> HTMLResponse:
        """Return it."""
        return HTMLResponse(self._html, headers={"content-security-policy": self._policy})


def main(argv: list[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="chat_demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8000, help="port; 0 picks a free one (%(default)s)")
    parser.add_argument("--once", action="store_true", help="exit after measuring")
    options = parser.parse_args(argv)
    # The workers do not have these modules, so their code travels with the deployments.
    cloudpickle.register_pickle_by_value(chat_engine)
    cloudpickle.register_pickle_by_value(ngram)
    for number in ENDINGS:
        signal.signal(number, signal.default_int_handler)
    try:
        return run(options)
    except PortInUseError as error:
        print(f"chat_demo: {error} Choose another port with --port.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopping.", flush=True)
        return 0


def run(options: argparse.Namespace) -> int:
    """Start the cluster, deploy, serve or measure, and stop; return the exit status."""
    paragraphs = [each for path in sorted(PAGES.rglob("*.md")) for each in read(path)]
    print(f"Starting a Dask cluster; the model reads {len(paragraphs)} paragraphs of docs/ ...", flush=True)
    client = serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    try:
        model = chat_engine.config(paragraphs, step_s=0.02, autoscaling_config=AUTOSCALING)
        serve.run(build_app({MODEL: model}), name="openai", route_prefix="/")
        html = (HERE / "page.html").read_text(encoding="utf-8")
        serve.run(serve.deployment(Page).bind(html), name="page", route_prefix="/chat")
        url = client.http_urls()[0].rstrip("/")
        print(f"Chat       {url}/chat")
        print(f"API        {url}/v1, the model is {MODEL!r}")
        print(f"Dashboard  {client.dashboard_link or 'none (it needs bokeh)'}", flush=True)
        if options.once:
            return measure(client, url)
        print("Serving until Ctrl-C.", flush=True)
        threading.Event().wait()
    finally:
        # A second Ctrl-C must not leave workers running.
        for number in ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        client.shutdown()
    return 0


def read(path: Path) -> list[str]:
    """Return the paragraphs of a page."""
    return ngram.paragraphs_of(path.read_text(encoding="utf-8"))


def measure(client: serve.Client, url: str) -> int:
    """Ask questions, print the measurements, and return 1 if something is wrong."""
    one = ask(url, QUESTION, seed=1)
    same = ask(url, QUESTION, seed=1)
    print(f"Answer     {one.text}")
    print(f"One        first token after {1000 * one.first_token_s:.0f} ms, {one.tokens} tokens")
    leave(url)
    began = time.perf_counter()
    with ThreadPoolExecutor(CALLERS) as pool:
        answers = list(pool.map(lambda seed: ask(url, QUESTION, seed=seed), range(CALLERS)))
    elapsed_s = time.perf_counter() - began
    first_ms = 1000 * statistics.median(each.first_token_s for each in answers)
    print(
        f"{CALLERS} at once {sum(each.tokens for each in answers) / elapsed_s:.0f} tokens per second, first "
        f"token after {first_ms:.0f} ms (median)"
    )
    handle = serve.get_deployment_handle(MODEL, "openai")
    replicas = len(handle.broadcast("record_autoscaling_stats").results())
    left = handle.record_autoscaling_stats.remote().result()
    print(f"Replicas   {replicas}, 1 before")
    print(f"At rest    {left}", flush=True)
    is_right = one.text == same.text and all(each.text for each in answers)
    return 0 if is_right and replicas == AUTOSCALING["max_replicas"] and not left["requests_active"] else 1


def ask(url: str, question: str, *, seed: int | None = None) -> Answer:
    """Ask a question, read the answer as a stream, and return it."""
    began, texts, first_s = time.perf_counter(), [], 0.0
    with opened(url, question, seed) as events:
        for event in events:
            for choice in event["choices"]:
                if choice["delta"].get("content"):
                    first_s = first_s or time.perf_counter() - began
                    texts.append(choice["delta"]["content"])
    return Answer("".join(texts), first_s, len(texts))


def leave(url: str) -> None:
    """Ask a question, and leave after the third event: the slot is free before the next step."""
    with opened(url, "Tell me everything.", None) as events:
        for _ in range(3):
            next(events)


@contextmanager
def opened(url: str, question: str, seed: int | None) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the events of an answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "stream": True, "seed": seed}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = (line[6:] for line in response if line.startswith(b"data: ") and line[6:7] != b"[")
        yield (json.loads(line) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
