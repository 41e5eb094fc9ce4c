"""The examples of tasks and sources."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import quick_instance
from redis_servers import redis_server

from daskserve.testing import local_instance

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "examples" / "redis_streams"), str(ROOT / "examples" / "videos")]


@pytest.mark.nightly
def test_a_redis_stream_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import clicks  # the example's folder must be in the path first
    import redis

    with redis_server(tmp_path) as url, redis.Redis.from_url(url) as broker, local_instance() as client:
        monkeypatch.setattr(clicks, "URL", url)
        for number in range(500):
            broker.xadd("clicks", {"page": f"page{number % 2}"})
        handle = client.run(clicks.app)

        def counts() -> Any:
            return handle.remote().result() == {"page0": 250, "page1": 250}

        quick_instance.poll_for(counts, what=lambda: repr(handle.remote().result()))
        quick_instance.poll_for(
            lambda: broker.xpending("clicks", "counters")["pending"] == 0, what=lambda: "not acknowledged"
        )


@pytest.mark.nightly
def test_videos_are_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    import videos

    videos.main(videos=3, frames=30)
    printed = capsys.readouterr().out
    for seed in range(3):
        assert f"video-{seed}-30 {{'frames': 30, 'start': (3, 23), 'end': (32, 23)}}" in printed
