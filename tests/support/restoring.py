"""A program that restores two backups in turn until it is killed. Run as ``restoring.py URL FILE FILE``."""

from __future__ import annotations

import itertools
import sys

from daskserve import stores

if __name__ == "__main__":
    url, *files = sys.argv[1:]
    for file in itertools.cycle(files):
        stores.restore(file, url, force=True)
        stores.backup(url, f"{files[0]}.again")
        sys.stdout.write("restored\n")
        sys.stdout.flush()
