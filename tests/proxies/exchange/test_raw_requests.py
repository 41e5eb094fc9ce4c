"""Raw requests by family. One message shows all cases with an unexpected outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import raw_bodies
import raw_heads
import raw_moments
from fuzz_requests import Delivery
from fuzzed_server import FuzzedServer
from raw_cases import RawCase
from reading_answers import read_answers

pytestmark = pytest.mark.smoke

FAMILIES = [*raw_heads.FAMILIES, *raw_bodies.FAMILIES, *raw_moments.FAMILIES]


def test_the_table_has_each_case_once() -> None:
    cases = [case for family in FAMILIES for case in family()]
    assert [name for name, count in Counter(case.name for case in cases).items() if count > 1] == []
    assert len({(case.data, case.stops) for case in cases}) == len(cases) >= 800


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_raw_requests_have_one_outcome(server: FuzzedServer, family: Callable[[], Iterator[RawCase]]) -> None:
    wrong = []
    for case in family():
        try:
            found = delivered(server, case)
        except AssertionError as error:  # an invalid response, or the request has left something behind
            wrong.append(f"{case.name}: {error}")
            continue
        if found != case:
            wrong.append(f"{case.name}: {found} in place of {case}")
    assert not wrong, "\n".join(wrong)


def delivered(server: FuzzedServer, case: RawCase) -> RawCase:
    """Return the case with the server's outcome."""
    outcome = server.deliver(Delivery(case.data, case.stops), probes=False)
    lines = [line for line, _ in case.seen] or [case.data]
    answers = read_answers(outcome.answer, [line.partition(b" ")[0] for line in lines])
    seen = []
    for each in outcome.seen:
        target = each.scope["raw_path"] + b"?" * bool(each.scope["query_string"]) + each.scope["query_string"]
        line = each.scope["method"].encode() + b" " + target
        seen.append((line, bytes(each.body) if each.is_complete else None))
    return replace(
        case,
        statuses=tuple(answer.status for answer in answers),
        is_cut=any(answer.is_cut for answer in answers),
        seen=tuple(seen),
        is_closed=outcome.is_closed,
    )
