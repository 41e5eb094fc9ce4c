"""Ray Data: `map_batches` with two actors over dataframes in memory; prints the seconds of each round.

Arguments: rounds, partitions, rows, columns, hidden units. See `bench_batch.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import pandas
import ray

ROUNDS, PARTITIONS, ROWS, COLUMNS, HIDDEN = map(int, sys.argv[1:])


class Network:
    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.first = rng.normal(size=(COLUMNS, HIDDEN))
        self.second = rng.normal(size=HIDDEN)

    def __call__(self, frame: Any) -> Any:
        hidden = np.maximum(frame.to_numpy() @ self.first, 0.0)
        return pandas.DataFrame({"score": hidden @ self.second})


ray.init(num_cpus=4, logging_level="ERROR", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
names = [f"c{number}" for number in range(COLUMNS)]
frames = [
    pandas.DataFrame(np.random.default_rng(number).normal(size=(ROWS, COLUMNS)), columns=names)
    for number in range(PARTITIONS)
]
data = ray.data.from_pandas(frames).materialize()


def run() -> float:
    began = time.perf_counter()
    scored = data.map_batches(Network, batch_size=ROWS, batch_format="pandas", concurrency=2, num_cpus=1)
    scored.sum("score")
    return time.perf_counter() - began


run()
print(json.dumps([run() for _ in range(ROUNDS)]))
