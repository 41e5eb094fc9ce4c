"""Request ids are unique UUIDs."""

from __future__ import annotations

import random
import uuid

from daskserve.common.clock import RequestIds


def test_drawn_ids_are_valid_and_unique_for_any_bits() -> None:
    seen = set()
    for seed in range(20):
        ids = RequestIds(random.Random(seed))
        for _ in range(100):
            text = ids.next()
            parsed = uuid.UUID(text)
            assert (str(parsed), parsed.version, parsed.variant) == (text, 4, uuid.RFC_4122)
            seen.add(text)
    assert len(seen) == 2000
