"""Screenshots of daskserve's page, taken with chromium on a cluster that serves a small shop under load."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

from chromium import chromium
from distributed import Client, LocalCluster

import daskserve as serve

#: By name: the rest of the address after the instance, the size, and whether the colours are dark.
PHOTOGRAPHS = {
    "overview": ("", (1280, 860), False),
    "deployment": ("/app/shop/Model", (1280, 980), False),
    "graph": ("/graph", (1280, 720), True),
    "phone": ("", (360, 740), True),
}
#: The sizes for which the page is designed, and the screenshots that ``--sizes`` takes at each size.
SIZES = ((360, 740), (768, 1024), (1280, 800), (1440, 900), (2560, 1440))
PLACES = ("", "/app/shop", "/app/shop/Model", "/app/broken/Broken", "/graph", "/events", "/logs", "/system")
#: How long the load runs before the first screenshot; the charts show two minutes.
LOAD_S = 125.0


@serve.deployment(num_replicas=2)
class Features:
    async def __call__(self, number: int) -> int:
        await asyncio.sleep(random.uniform(0.004, 0.014))
        return number + 1


@serve.deployment(num_replicas=3, max_ongoing_requests=8)
class Model:
    async def __call__(self, number: int) -> int:
        await asyncio.sleep(random.uniform(0.01, 0.04))
        return number * 2


@serve.deployment
class Audit:
    async def __call__(self, number: int) -> None:
        pass


@serve.deployment(num_replicas=2)
class Shop:
    def __init__(self, features: serve.Handle, model: serve.Handle, audit: serve.Handle) -> None:
        self.features, self.model, self.audit = features, model, audit

    async def __call__(self, request: object) -> str:
        found = await self.model.remote(await self.features.remote(1))
        await self.audit.remote(found)
        if random.random() < 0.03:
            raise LookupError("no such product")
        return str(found)


@serve.deployment(autoscaling_config={"min_replicas": 1, "max_replicas": 3})
class Search:
    async def __call__(self, request: object) -> str:
        await asyncio.sleep(0.02)
        return "found"


@serve.deployment
class Broken:
    def __init__(self) -> None:
        raise FileNotFoundError("/models/v7.bin")

    def __call__(self, request: object) -> None:
        pass


def _send(url: str, pause_s: float, ended: threading.Event) -> None:
    while not ended.is_set():
        with suppress(OSError):
            urllib.request.urlopen(url, timeout=5).read()
        wave = 1.3 + random.random() + 0.8 * (time.monotonic() % 60 > 30)
        time.sleep(pause_s * wave)


def draw_page(folder: Path, *, has_all_sizes: bool = False, load_s: float = LOAD_S) -> None:
    """Save the screenshots as ``page-*.png``."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(n_workers=3, threads_per_worker=2, dashboard_address=":0"))
        dask = stack.enter_context(Client(cluster))
        client = stack.enter_context(serve.start(dask_client=dask, http_options={"port": 0}))
        client.run(Shop.bind(Features.bind(), Model.bind(), Audit.bind()), name="shop", route_prefix="/shop")
        client.run(Search.bind(), name="search", route_prefix="/search")
        with suppress(serve.errors.ServeError):
            client.run(Broken.bind(), name="broken", route_prefix="/broken")
        ended = threading.Event()
        stack.callback(ended.set)
        for path, pause_s in (("/shop", 0.04), ("/shop", 0.06), ("/search", 0.05)):
            sending = threading.Thread(target=_send, args=(client.http_urls()[0] + path, pause_s, ended))
            sending.start()
        assert client.page_link is not None
        taken = [(f"page-{name}", *each) for name, each in PHOTOGRAPHS.items()]
        if has_all_sizes:
            taken += [
                (f"{width}{'-dark' * is_dark}{place.replace('/', '-')}", place, (width, height), is_dark)
                for width, height in SIZES
                for place in PLACES
                for is_dark in (False, True)
            ]
        asyncio.run(_photograph(client.page_link, client.instance_name, taken, folder, load_s))


async def _photograph(
    url: str, instance: str, taken: list[tuple[str, str, tuple[int, int], bool]], folder: Path, load_s: float
) -> None:
    async with chromium() as tab:
        await tab.resize(1280, 860)
        await tab.open(f"{url}#/{instance}")
        await tab.until("site.parts.size > 1")
        await asyncio.sleep(load_s)
        for name, place, size, is_dark in taken:
            await tab.resize(*size, is_dark=is_dark)
            await tab.ask(f"location.hash = '#/{instance}{place}'")
            # Two seconds, because a page requests some of its parts after it has opened.
            await asyncio.sleep(2)
            (folder / f"{name}.png").write_bytes(await tab.photograph())
        assert not tab.troubles, tab.troubles


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--load-s", type=float, default=LOAD_S)
    arguments = parser.parse_args()
    draw_page(arguments.folder, has_all_sizes=arguments.sizes, load_s=arguments.load_s)
