"""The schedule of chaos runs."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from cases import for_each
from chaos_schedule import KINDS, rounds


def test_a_seed_repeats_its_schedule_and_another_one_differs() -> None:
    first, again, other = (list(islice(rounds(seed), 30)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@for_each("seed", range(20))
def test_every_kind_of_fault_comes_before_the_order_is_drawn_again(seed: int) -> None:
    drawn = [fault.kind for each in islice(rounds(seed), len(KINDS)) for fault in each]
    assert set(drawn) == set(KINDS)


def test_about_half_of_the_rounds_break_two_different_things() -> None:
    drawn = list(islice(rounds(0), 1000))
    sizes = Counter(len(each) for each in drawn)
    assert sizes.keys() == {1, 2}
    assert 400 < sizes[2] < 600
    assert all(len({fault.kind for fault in each}) == len(each) for each in drawn)
    pairs = {frozenset(fault.kind for fault in each) for each in drawn if len(each) == 2}
    assert frozenset({"kill scheduler", "freeze scheduler"}) not in pairs
    assert len(pairs) > 40
    assert all(len(each) == 1 for each in islice(rounds(0, pairs_share=0.0), 100))


def test_faults_have_targets_and_durations_of_their_kind() -> None:
    for each in islice(rounds(3), 200):
        for fault in each:
            shortest, longest = KINDS[fault.kind].lasts_s
            assert fault.target in KINDS[fault.kind].targets
            assert shortest <= fault.lasts_s <= longest
            assert 0 <= fault.at_s <= 2


def test_only_the_given_kinds_are_drawn() -> None:
    drawn = {fault.kind for each in islice(rounds(0, ("redeploy",)), 5) for fault in each}
    assert drawn == {"redeploy"}
