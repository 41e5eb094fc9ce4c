"""Serve a digit classifier on a local Dask cluster and measure it: ``make demo``.

Starts a cluster and deploys two replicas of `app.Digits`. Posts every held-out image over HTTP, compares the
answers with those of the same model in this process, and keeps serving until Ctrl-C.
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


class ReplicaRequest(NamedTuple):
    """The answer to one image: a label, or a problem."""

    label: int | None
    problem: str
    latency_s: float


def main(argv: list[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    options = parse_arguments(argv)
    # The workers do not have these modules. After this registration, their code travels with the deployment
    # to any cluster. In a project, install the package on the workers instead.
    cloudpickle.register_pickle_by_value(app)
    cloudpickle.register_pickle_by_value(model)
    # All signals end the demo like Ctrl-C. SIGINT is set too, because a shell's `&` ignores it.
    for number in ENDINGS:
        signal.signal(number, signal.default_int_handler)
    try:
        return run(options)
    except PortInUseError as error:
        print(f"demo: {error} Choose another port with --port.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0 picks a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--once", action="store_true", help="exit after measuring; the exit status is 1 if a check failed"
    )
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> int:
    """Start the cluster, deploy, measure, serve and stop; return the exit status."""
    print(f"Starting a Dask cluster and {REPLICAS} replicas ...", flush=True)
    client = serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    try:
        client.create_backend("digits", app.Digits, config={"num_replicas": REPLICAS})
        client.create_endpoint("digits", backend="digits", route="/digits", methods=["POST"])
        url = client.http_urls()[0].rstrip("/") + "/digits"
        if not options.once:
            introduce(client, url)
        problems = demonstrate(url)
        if not options.once:
            print("Serving until Ctrl-C.", flush=True)
            wait_for_interrupt()
    finally:
        # A second Ctrl-C must not leave workers running.
        for number in ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        client.shutdown()
    return 1 if problems else 0


def introduce(client: Any, url: str) -> None:
    """Print the addresses, which are of use as long as the demo serves."""
    print(f"Address    {url}")
    print(f"Dashboard  {client.dashboard_link or 'none (it needs bokeh)'}")
    print(f"Try        curl --data-binary {shlex.quote(f'@{seven_path()}')} {url}", flush=True)


def demonstrate(url: str) -> list[str]:
    """Measure the service, print the results, and return the failed checks."""
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
    print(
        f"Rate       {len(answers) / elapsed_s:.0f} requests/s over {CONNECTIONS} keep-alive connections",
        flush=True,
    )
    for problem in problems:
        print(f"FAILED     {problem}", file=sys.stderr, flush=True)
    return problems


def accuracy(labels: list[int | None] | list[int], truth: list[int]) -> float:
    """Return the share of correct labels."""
    return sum(label == true for label, true in zip(labels, truth, strict=True)) / len(truth)


def compare(served: list[int | None], offline: list[int], truth: list[int], failures: list[str]) -> list[str]:
    """Return the differences between the served and the offline labels, and failed requests, as problems."""
    problems = []
    if failures:
        problems.append(f"{len(failures)} requests failed; the first error: {failures[0]}")
    different = [i for i, (a, b) in enumerate(zip(served, offline, strict=True)) if a != b]
    if different:
        problems.append(
            f"{len(different)} labels differ from the offline model's; images {different[:5]} ..."
        )
    if accuracy(served, truth) != accuracy(offline, truth):
        problems.append(f"accuracy {accuracy(served, truth)} is not {accuracy(offline, truth)}")
    return problems


def post_all(url: str, pngs: list[bytes]) -> list[ReplicaRequest]:
    """Post the images over several connections, and return the answers in order."""
    answers: dict[int, ReplicaRequest] = {}

    def post_share(first: int) -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
        for index in range(first, len(pngs), CONNECTIONS):
            answers[index] = post(connection, urlsplit(url).path, pngs[index])
        connection.close()

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(post_share, range(CONNECTIONS)))
    return [answers[index] for index in range(len(pngs))]


def post(connection: http.client.HTTPConnection, path: str, png: bytes) -> ReplicaRequest:
    """Post one image and return the answer."""
    start = time.perf_counter()
    try:
        connection.request("POST", path, body=png, headers={"Content-Type": "image/png"})
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return ReplicaRequest(None, f"{type(error).__name__}: {error}", time.perf_counter() - start)
    latency_s = time.perf_counter() - start
    if response.status != 200:
        return ReplicaRequest(None, f"{response.status} {body[:200].decode(errors='replace')}", latency_s)
    return ReplicaRequest(json.loads(body)["label"], "", latency_s)


def seven_path() -> Path:
    """Return the path of an example image; create the image if the file is missing."""
    path = HERE / "seven.png"
    if not path.exists():
        descriptor, name = tempfile.mkstemp(prefix="daskserve-seven-", suffix=".png")
        with open(descriptor, "wb") as file:
            file.write(model.seven())
        path = Path(name)
    return path


def wait_for_interrupt() -> None:
    """Wait until the user presses Ctrl-C or a signal asks the process to end."""
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print("\nStopping.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
