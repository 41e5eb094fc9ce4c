"""A queue of videos: each is a long task that reports its progress, and runs again if its process is killed.

Run ``python videos.py``. The videos are arrays of frames that this program creates. A task contains the
location of its video, such as a file in a bucket, not the data.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import daskserve as serve

queue = serve.tasks.TaskProcessorConfig(
    queue_name="videos",
    adapter_config=serve.tasks.SQLiteAdapterConfig(path=str(Path.cwd() / "videos.sqlite"), lease_s=10),
    max_retries=2,
    failed_task_queue_name="failed-videos",
)


def load_video(seed: int, frames: int) -> npt.NDArray[np.uint8]:
    """Return a video in which a bright square moves over noise."""
    rng = np.random.default_rng(seed)
    video = rng.integers(0, 60, (frames, 48, 64), dtype=np.uint8)
    for number, frame in enumerate(video):
        left = number % 48
        frame[20:28, left : left + 8] = 255
    return video


@serve.tasks.task_consumer(task_processor_config=queue)
class Videos:
    """Finds the square in each frame."""

    @serve.tasks.task_handler
    def track(self, seed: int, frames: int) -> dict[str, Any]:
        """Return the path of the square."""
        task = serve.tasks.get_task_context()
        path = []
        for number, frame in enumerate(load_video(seed, frames)):
            rows, columns = np.nonzero(frame > 200)
            path.append((int(columns.mean()), int(rows.mean())))
            time.sleep(0.002)  # a real model takes longer
            task.report_progress({"frames": number + 1, "of": frames})
        return {"frames": frames, "start": path[0], "end": path[-1]}


def main(videos: int = 6, frames: int = 200) -> None:
    """Submit videos, and print the progress of each until all are done."""
    serve.start(http_options={"location": "NoServer"})
    serve.run(serve.deployment(num_replicas=2, max_ongoing_requests=2)(Videos).bind())
    tasks = serve.tasks.instantiate_adapter_from_config(queue)
    # The id makes a video one task, however often this program is started.
    ids = [
        tasks.enqueue_task_sync("track", [seed, frames], id=f"video-{seed}-{frames}").id
        for seed in range(videos)
    ]
    while True:
        found = [tasks.get_task_status_sync(id) for id in ids]
        print(" ".join(f"{each.progress['frames']}" if each.progress else each.status for each in found))
        if all(each.status in ("SUCCESS", "FAILURE") for each in found):
            break
        time.sleep(0.5)
    for each in found:
        print(each.id, each.result)
    tasks.shutdown()
    serve.shutdown()


if __name__ == "__main__":
    main()
