"""Serve handwritten digits on a Dask cluster of this machine, and measure it: ``make demo``.

Starts a cluster, deploys two replicas of `app.Digits`, posts every held-out image over HTTP, compares the
answers with those of the same model in this process, and serves on until Ctrl-C.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shlex
import signal
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import app
import cloudpickle
import model

import daskserve as serve
from daskserve.errors import PortInUseError

HERE = Path(__file__).resolve().parent
REPLICAS = 2
CONNECTIONS = 4
TIMEOUT_S = 30.0
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Answer(NamedTuple):
    """What came back for one image: a label, or what went wrong."""

    label: int | None
    problem: str
    latency_s: float


def main(argv: list[str] | None = None) -> int:
    """Run the demonstration and return the exit status."""
    options = parse_arguments(argv)
    # The workers know neither this folder nor its modules. Registered like this, the code of the modules
    # travels with what is deployed, to any cluster; in a project one would install a package on the workers.
    cloudpickle.register_pickle_by_value(app)
    cloudpickle.register_pickle_by_value(model)
    for (
        number
    ) in ENDINGS:  # all end in order, as Ctrl-C does; set even for SIGINT, which a shell's `&` ignores
        signal.signal(number, signal.default_int_handler)
    try:
        return run(options)
    except PortInUseError as error:
        print(f"demo: {error} Choose another one with --port.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="where to listen; 0 picks a free port (%(default)s)"
    )
    parser.add_argument(
        "--once", action="store_true", help="end after measuring; the status is 1 if a check failed"
    )
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> int:
    """Start, deploy, measure, serve, stop."""
    print(f"Starting a Dask cluster and {REPLICAS} replicas ...", flush=True)
    client = serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    try:
        client.create_backend("digits", app.Digits, config={"num_replicas": REPLICAS})
        client.create_endpoint("digits", backend="digits", route="/digits", methods=["POST"])
        problems = demonstrate(client)
        if not options.once:
            print("Serving until Ctrl-C.", flush=True)
            wait_for_interrupt()
    finally:
        # A second Ctrl-C, from an impatient hand, must not leave workers behind.
        for number in ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        client.shutdown()
    return 1 if problems else 0


def demonstrate(client: Any) -> list[str]:
    """Measure the service, print what users want to know, and return the checks that failed."""
    url = client.http_urls()[0].rstrip("/") + "/digits"
    print(f"Address    {url}")
    print(f"Try        curl --data-binary {shlex.quote(f'@{seven_path()}')} {url}", flush=True)

    split = model.load_split()
    offline = [each["label"] for each in model.classify(model.train(split), split.held_out_images)]
    pngs = [model.png_from_features(row) for row in split.held_out_images]
    start = time.perf_counter()
    answers = post_all(url, pngs)
    elapsed_s = time.perf_counter() - start

    truth = split.held_out_labels.tolist()
    served = [answer.label for answer in answers]
    problems = compare(served, offline, truth, [each.problem for each in answers if each.problem])
    latencies_ms = [1000 * answer.latency_s for answer in answers]
    p99 = statistics.quantiles(latencies_ms, n=100)[98]
    verdict = "the same" if not problems else "NOT the same"
    print(f"Accuracy   {accuracy(served, truth):.2%} of {len(truth)} held-out images over HTTP;")
    print(f"           offline {accuracy(offline, truth):.2%}: accuracy and every single label are {verdict}")
    print(f"Latency    p50 {statistics.median(latencies_ms):.2f} ms, p99 {p99:.2f} ms")
    print(f"Rate       {len(answers) / elapsed_s:.0f} requests/s over {CONNECTIONS} keep-alive connections")
    print(f"Dashboard  {client.dashboard_link or 'none (it needs bokeh)'}", flush=True)
    for problem in problems:
        print(f"FAILED     {problem}", file=sys.stderr, flush=True)
    return problems


def accuracy(labels: list[int | None] | list[int], truth: list[int]) -> float:
    """Return the share of labels that are right."""
    return sum(label == true for label, true in zip(labels, truth, strict=True)) / len(truth)


def compare(served: list[int | None], offline: list[int], truth: list[int], troubles: list[str]) -> list[str]:
    """Return what keeps the service from being as good as the model that it serves."""
    problems = []
    if troubles:
        problems.append(f"{len(troubles)} requests were not answered, the first with: {troubles[0]}")
    different = [i for i, (a, b) in enumerate(zip(served, offline, strict=True)) if a != b]
    if different:
        problems.append(
            f"{len(different)} labels differ from the offline model's; images {different[:5]} ..."
        )
    if accuracy(served, truth) != accuracy(offline, truth):
        problems.append(f"accuracy {accuracy(served, truth)} is not {accuracy(offline, truth)}")
    return problems


def post_all(url: str, pngs: list[bytes]) -> list[Answer]:
    """Post every image, each connection taking its share, and return the answers in order."""
    answers: dict[int, Answer] = {}

    def post_share(first: int) -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
        for index in range(first, len(pngs), CONNECTIONS):
            answers[index] = post(connection, urlsplit(url).path, pngs[index])
        connection.close()

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(post_share, range(CONNECTIONS)))
    return [answers[index] for index in range(len(pngs))]


def post(connection: http.client.HTTPConnection, path: str, png: bytes) -> Answer:
    """Post one image."""
    start = time.perf_counter()
    try:
        connection.request("POST", path, body=png, headers={"Content-Type": "image/png"})
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return Answer(None, f"{type(error).__name__}: {error}", time.perf_counter() - start)
    latency_s = time.perf_counter() - start
    if response.status != 200:
        return Answer(None, f"{response.status} {body[:200].decode(errors='replace')}", latency_s)
    return Answer(json.loads(body)["label"], "", latency_s)


def seven_path() -> Path:
    """Return the path of an image to try with; it is made if it is not there."""
    path = HERE / "seven.png"
    if not path.exists():
        descriptor, name = tempfile.mkstemp(prefix="daskserve-seven-", suffix=".png")
        with open(descriptor, "wb") as file:
            file.write(model.seven())
        path = Path(name)
    return path


def wait_for_interrupt() -> None:
    """Return when the user presses Ctrl-C, or the process is asked to end."""
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print("\nStopping.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
