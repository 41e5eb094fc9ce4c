"""Cause failures of an instance under load, chosen by a seed, and check the results of clients.

Machines are network namespaces: this needs Linux and root, `ip` and `iptables`. It prints each fault, a table
of their effects, and each violation. The exit status is 0 if all invariants held, 1 if not, and 2 if it could
not cause a requested fault; then it tries nothing, and prints what is missing.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).parent
#: The exit status if a requested fault was not tried.
NOT_TRIED = 2
# For the workers: they import the application of the run.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])

from chaos_machines import ChaosMachines  # noqa: E402
from chaos_run import ChaosRun, Setting  # noqa: E402
from chaos_schedule import HOSTS, KINDS, PAIRS_SHARE, Round, rounds  # noqa: E402
from chaos_verdict import report, violations  # noqa: E402
from machines import Machines, machines  # noqa: E402


def read_arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long things break (10)")
    parser.add_argument("--seed", type=int, help="repeats the schedule of another run")
    parser.add_argument("--server", choices=("tornado", "asyncio"), default="tornado")
    parser.add_argument("--location", choices=("HeadOnly", "EveryWorker"), default="HeadOnly")
    parser.add_argument("--isolation", choices=("thread", "process"), default="thread")
    parser.add_argument("--only", help=f"some faults, separated by commas, of: {', '.join(KINDS)}")
    parser.add_argument("--alone", action="store_true", help="never break two things at once")
    parser.add_argument(
        "--keep", action="store_true", help="keep the folder with all logs, also of a good run"
    )
    arguments = parser.parse_args(given)
    arguments.kinds = list(KINDS) if arguments.only is None else arguments.only.split(",")
    if unknown := [kind for kind in arguments.kinds if kind not in KINDS]:
        parser.error(f"--only has no faults of these names: {', '.join(map(repr, unknown))}; see --help")
    return arguments


def main(given: list[str] | None = None) -> int:
    arguments = read_arguments(given)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1_000_000)
    # This also removes the machines and all processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        try:
            found = stack.enter_context(machines("hub", "clients", *HOSTS))
        except OSError as error:
            print(f"No chaos here, nothing was tried: it needs Linux, root and network namespaces; {error}.")
            return NOT_TRIED
        tried: set[str] = set()
        folder = Path(tempfile.mkdtemp(prefix="daskserve-chaos-"))
        found_violations = play(found, folder, arguments, seed, tried)
    if found_violations or arguments.keep:
        print(f"The logs of all processes are in {folder}.")
    else:
        shutil.rmtree(folder)
    if found_violations:
        return 1
    left_out = [kind for kind in arguments.kinds if kind not in tried]
    if arguments.only is not None and left_out:
        print(f"Not tried, for lack of time: {', '.join(left_out)}. Give it more --minutes.")
        return NOT_TRIED
    return 0


def play(
    found: Machines, folder: Path, arguments: argparse.Namespace, seed: int, tried: set[str]
) -> list[str]:
    """Cause faults; return the violations, and add the kinds of faults to ``tried``."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    setting = Setting(arguments.server, arguments.location, arguments.isolation)
    say(f"seed {seed}, {setting}, faults: {', '.join(arguments.kinds)}")
    # This program is one of the clients, on a machine that does not fail.
    exec(found.enter("clients"))
    run = ChaosRun(ChaosMachines(found, folder), folder, setting, say)
    schedule = rounds(seed, arguments.kinds, pairs_share=0.0 if arguments.alone else PAIRS_SHARE)

    def noted() -> Iterator[Round]:
        for each in schedule:
            tried.update(fault.kind for fault in each)
            yield each

    seen = run.play(noted(), 60 * arguments.minutes)
    wrong = violations(seen)
    print(f"\n{report(seen)}\n")
    print("\n".join([f"VIOLATED, seed {seed}: {each}" for each in wrong] or ["All invariants held."]))
    return wrong


if __name__ == "__main__":
    sys.exit(main())
