"""Break everything that can break under an instance with load, by a seed, and judge what clients saw.

Machines are network namespaces: this needs Linux and root. Elsewhere it says so and ends. It prints what it
breaks, a table of what that cost, and each violation; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).parent
# For this program, and for the workers, which import the application of the run.
sys.path[:0] = FOLDERS = [str(HERE), str(HERE.parent / "integration"), str(HERE.parent / "proxies")]
os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])

from chaos_machines import ChaosMachines  # noqa: E402
from chaos_run import ChaosRun, Setting  # noqa: E402
from chaos_schedule import HOSTS, KINDS, PAIRS_SHARE, rounds  # noqa: E402
from chaos_verdict import report, violations  # noqa: E402
from machines import Machines, machines  # noqa: E402


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long things break (10)")
    parser.add_argument("--seed", type=int, help="repeats the schedule of another run")
    parser.add_argument("--server", choices=("tornado", "uvicorn"), default="tornado")
    parser.add_argument("--location", choices=("HeadOnly", "EveryWorker"), default="HeadOnly")
    parser.add_argument("--isolation", choices=("thread", "process"), default="thread")
    parser.add_argument("--only", help=f"some faults, separated by commas, of: {', '.join(KINDS)}")
    parser.add_argument("--alone", action="store_true", help="never break two things at once")
    parser.add_argument(
        "--keep", action="store_true", help="keep the folder with all logs, also of a good run"
    )
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1_000_000)
    kinds = tuple(arguments.only.split(",")) if arguments.only else tuple(KINDS)
    # The machines and all processes are removed then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        try:
            found = stack.enter_context(machines("hub", "clients", *HOSTS))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"No chaos here: it needs Linux, root, iptables and network namespaces ({error}).")
            return 0
        folder = Path(tempfile.mkdtemp(prefix="daskserve-chaos-"))
        found_violations = play(found, folder, arguments, kinds, seed)
    if found_violations or arguments.keep:
        print(f"The logs of all processes are in {folder}.")
    else:
        shutil.rmtree(folder)
    return 1 if found_violations else 0


def play(
    found: Machines, folder: Path, arguments: argparse.Namespace, kinds: tuple[str, ...], seed: int
) -> list[str]:
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    setting = Setting(arguments.server, arguments.location, arguments.isolation)
    say(f"seed {seed}, {setting}, faults: {', '.join(kinds)}")
    # This program is a client like others: on a machine that does not fail.
    exec(found.enter("clients"))
    run = ChaosRun(ChaosMachines(found, folder), folder, setting, say)
    schedule = rounds(seed, kinds, pairs_share=0.0 if arguments.alone else PAIRS_SHARE)
    seen = run.play(schedule, 60 * arguments.minutes)
    wrong = violations(seen)
    print(f"\n{report(seen)}\n")
    print("\n".join([f"VIOLATED, seed {seed}: {each}" for each in wrong] or ["All invariants held."]))
    return wrong


if __name__ == "__main__":
    sys.exit(main())
