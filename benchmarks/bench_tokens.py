"""Streams of tokens over HTTP: daskserve's continuous batches compared with other servers' fixed batches.

The model sleeps for each step, as if an accelerator computed it, and has 8 slots. Texts have 5 to 200 tokens
on a logarithmic scale. For some seconds, each caller requests one text after another over its own connection,
and reads server-sent events. Measured: tokens per second, the time from the request to the first token, and
the CPU time per token. mosec, LitServe and Ray Serve wait 10 ms for a batch to fill. Systems take turns;
results are medians over the runs.

The others need a separate environment: ``python -m venv DIR``, then ``DIR/bin/pip install "ray[serve]" mosec
litserve``. Run: ``python benchmarks/bench_tokens.py [--python DIR/bin/python] [--only WORD] [--runs N]``.
"""

from __future__ import annotations

import argparse
import re
import time
from typing import Any

from http_load import Place, end_on_sigterm, serving
from starlette.responses import StreamingResponse
from stream_load import Texts, compare, peers

import daskserve as serve

SLOTS, LEAST, MOST = 8, 5, 200


def make_writer(step_s: float) -> type:
    """Return the served class."""

    class Writer:
        @serve.batching.continuous_batch(max_slots=SLOTS)
        def generate(self, active: list[Any]) -> list[str]:
            time.sleep(step_s)
            for each in active:
                if len(each.outputs) + 1 == each.args[0]:
                    each.finish()
            return ["data: token\n\n"] * len(active)

        async def __call__(self, request: Any) -> Any:
            count = (await request.json())["count"]
            return StreamingResponse(self.generate(count), media_type="text/event-stream")

    return Writer


TEXTS = Texts(
    "",
    count=lambda rng: int(LEAST * (MOST / LEAST) ** rng.random() + 0.5),
    body=lambda count: {"count": count},
    token=re.compile(rb"token"),
)
#: The other systems, and their programs.
PROGRAMS = {"mosec": "mosec_tokens.py", "LitServe": "litserve_tokens.py", "Ray Serve": "ray_tokens.py"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", help="interpreter of the environment with the others; default: without")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--step", type=float, default=0.005, help="seconds of a step")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 32, 200])
    parser.add_argument("--only", default="", help="only the other systems whose name contains this text")
    given = parser.parse_args()
    end_on_sigterm()
    place = Place(hops=1, config={"max_concurrent_queries": 400})
    with (
        serving(place, make_writer(given.step)) as us,
        peers(PROGRAMS, given.step, python=given.python, only=given.only) as others,
    ):
        systems = {"daskserve": us, **others}
        compare(systems, TEXTS, callers=given.callers, runs=given.runs, seconds=given.seconds)


if __name__ == "__main__":
    main()
