"""Raw requests, named: what a connection makes of each."""

from __future__ import annotations

from collections import Counter

import pytest
import raw_bodies
import raw_heads
import raw_moments
from fuzz_requests import Delivery
from fuzzed_server import FuzzedServer
from raw_cases import RawCase
from reading_answers import read_answers

pytestmark = pytest.mark.smoke

CASES = [
    case for each in (raw_heads, raw_bodies, raw_moments) for family in each.FAMILIES for case in family()
]


def test_the_table_has_each_case_once() -> None:
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []
    assert len({(case.data, case.stops) for case in CASES}) == len(CASES) >= 400


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_raw_request_has_one_outcome(server: FuzzedServer, case: RawCase) -> None:
    outcome = server.deliver(Delivery(case.data, case.stops), probes=False)
    lines = [line for line, _ in case.seen] or [case.data]
    answers = read_answers(outcome.answer, [line.partition(b" ")[0] for line in lines])
    assert tuple(answer.status for answer in answers) == case.statuses
    assert any(answer.is_cut for answer in answers) == case.is_cut
    seen = []
    for each in outcome.seen:
        target = each.scope["raw_path"] + b"?" * bool(each.scope["query_string"]) + each.scope["query_string"]
        line = each.scope["method"].encode() + b" " + target
        seen.append((line, bytes(each.body) if each.is_complete else None))
    assert tuple(seen) == case.seen
    assert outcome.is_closed == case.is_closed
