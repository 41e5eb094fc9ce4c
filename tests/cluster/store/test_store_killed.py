"""A commit that returned survives SIGKILL of its process; a pending one is applied whole or not at all."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import committing
import pytest
from store_harness import opened

from daskserve.cluster.store.opening import open_store

#: How often each program is killed and restarted on its store.
ROUNDS = 3


def commit_until_killed(url: str, commits: int) -> int:
    """Kill a process after at least ``commits`` commits; return the last one it acknowledged."""
    with subprocess.Popen(
        [sys.executable, committing.__file__, url], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        acknowledged = ""
        for _ in range(commits):
            acknowledged = process.stdout.readline()
        process.kill()
        # Lines printed before the kill count too; the last line may be cut off.
        rest = [line for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    return int([acknowledged, *rest][-1])


async def found_at(url: str) -> tuple[Mapping[str, bytes], Mapping[str, str], int]:
    async with opened(open_store(url, "i")) as store:
        return await store.load(), store.problems(), await store.newest_epoch()


@pytest.mark.parametrize("url", ["sqlite:///{}/store.db", "file://{}/store"])
async def test_every_acknowledged_commit_survives_sigkill(url: str, tmp_path: Path) -> None:
    url = url.format(tmp_path)
    rng = random.Random(7)
    for round_number in range(1, ROUNDS + 1):
        acknowledged = commit_until_killed(url, rng.randrange(1, 60))
        records, problems, epoch = await found_at(url)
        count = int(records["count"])
        # One more commit may be written without its acknowledgement.
        assert count in (acknowledged, acknowledged + 1)
        assert records == committing.records_after(count)
        assert problems == {}
        assert epoch == round_number
