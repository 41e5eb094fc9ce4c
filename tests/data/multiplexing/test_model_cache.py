"""Which models a replica keeps."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tables import each_case

from daskserve.data.multiplexing.cache import CachedModel, ModelCache
from daskserve.data.multiplexing.ids import MAX_SHOWN, check_model_id, short_id

pytestmark = pytest.mark.smoke


def use(cache: ModelCache, *ids: str) -> list[str]:
    """Use models one after another; return the ids of those that were dropped."""
    dropped: list[str] = []
    for model_id in ids:
        if cache.use(model_id, 0.0) is None:
            dropped += load(cache, model_id) or ["none"]
    return [each for each in dropped if each != "none"]


def load(cache: ModelCache, model_id: str, size: int = 0, requesters: Iterable[int] = ()) -> list[str] | None:
    """Load a model if it gets room; return the ids of those that are dropped for it."""
    entry = cache.models.get(model_id) or cache.expect(model_id, 0.0)
    victims = cache.victims(entry, set(requesters))
    if victims is None:
        return None
    for each in victims:
        cache.drop(each)
        cache.left(each)
    cache.admit(entry)
    cache.loaded(entry, model_id, size)
    surplus = cache.surplus(entry)
    for each in surplus:
        cache.drop(each)
        cache.left(each)
    return [each.id for each in (*victims, *surplus)]


def held(cache: ModelCache, model_id: str, *holders: int) -> CachedModel:
    cache.models[model_id].holders.update(holders)
    return cache.models[model_id]


@each_case(
    ("used", "dropped", "kept"),
    [
        ("ab", "", "ab"),
        ("abc", "a", "bc"),
        ("abac", "b", "ac"),
        ("abcbd", "ac", "bd"),
        ("aaabc", "a", "bc"),  # a few uses more make no difference
        ("abaabbc", "a", "bc"),
    ],
)
def test_the_least_recently_used_model_is_dropped(used: str, dropped: str, kept: str) -> None:
    cache = ModelCache(2)
    assert "".join(use(cache, *used)) == dropped
    assert "".join(cache.models) == kept


def test_a_popular_model_outlives_rare_ones_that_were_used_later() -> None:
    cache = ModelCache(2)
    use(cache, *("a" * 40))
    assert use(cache, "b", "c", "d", "e") == ["b", "c", "d"]
    assert list(cache.models) == ["a", "e"]


def test_a_model_that_was_popular_once_is_dropped_in_the_end() -> None:
    cache = ModelCache(2)
    use(cache, *("a" * 40))
    dropped = use(cache, *(f"m{number}" for number in range(3000)))
    assert "a" in dropped


def test_requests_for_a_model_that_does_not_load_yet_make_it_popular() -> None:
    cache = ModelCache(2)
    use(cache, "a", "b")
    for _ in range(5):
        assert cache.use("c", 0.0) is None
    assert cache.popularity(cache.expect("c", 0.0)) == pytest.approx(5, rel=0.3)


def test_a_dropped_model_is_remembered_but_not_for_ever() -> None:
    cache = ModelCache(1)
    use(cache, *("a" * 40), *("b" * 100), "a")
    assert cache.popularity(cache.models["a"]) > 20
    use(cache, *(f"m{number}" for number in range(3000)))
    assert len(cache._dropped) <= 256


def test_a_model_in_use_stays_and_the_next_one_waits() -> None:
    cache = ModelCache(2)
    use(cache, "a", "b")
    held(cache, "a", 1)
    assert load(cache, "c") == ["b"]
    held(cache, "c", 2)
    assert load(cache, "d") is None
    # A request may give up its own model for its next one, so that two requests never wait for each other.
    assert load(cache, "d", requesters=[2]) == ["c"]


def test_pinned_models_stay() -> None:
    cache = ModelCache(2, pinned=["a", "b"])
    use(cache, "a", "b")
    assert load(cache, "c") is None
    cache = ModelCache(2, pinned=["a"])
    assert use(cache, "a", "b", "c", "d", "a", "b") == ["b", "c", "d"]


def test_a_load_without_callers_makes_room() -> None:
    cache = ModelCache(1)
    first = cache.expect("a", 0.0)
    cache.admit(first)
    first.waiting = 1
    second = cache.expect("b", 0.0)
    assert cache.victims(second) is None
    first.waiting = 0
    assert cache.victims(second) == [first]


def test_a_model_keeps_its_room_until_it_has_left() -> None:
    cache = ModelCache(1)
    use(cache, "a")
    entry = cache.expect("b", 0.0)
    (victim,) = cache.victims(entry) or []
    cache.drop(victim)
    cache.admit(entry)
    assert cache.must_wait()
    cache.left(victim)
    assert not cache.must_wait()


def test_models_are_dropped_by_bytes() -> None:
    cache = ModelCache(None, 100)
    assert [load(cache, name, 40) for name in "ab"] == [[], []]
    assert load(cache, "c", 40) == ["a"]
    assert load(cache, "d", 90) == ["b", "c"]
    assert load(cache, "a", 40) == ["d"]


def test_a_model_that_turns_out_large_drops_others() -> None:
    cache = ModelCache(None, 100)
    for name in "ab":
        load(cache, name, 20)
    assert load(cache, "c", 90) == ["a", "b"]


def test_only_idle_models_that_are_not_pinned_are_idle() -> None:
    cache = ModelCache(4, pinned=["pinned"])
    use(cache, "pinned", "held", "idle")
    held(cache, "held", 1)
    cache.models["idle"].used_at = 5.0
    assert cache.idle_since(4.0) == []
    assert [each.id for each in cache.idle_since(5.0)] == ["idle"]


def test_ids_are_checked_and_long_ones_have_a_short_name() -> None:
    with pytest.raises(ValueError, match="The model ID cannot be empty; the caller names it in the header"):
        check_model_id("")
    with pytest.raises(TypeError, match="must be a string; got 7"):
        check_model_id(7)
    assert short_id("m1") == "m1"
    long = "x" * 10_000
    assert len(short_id(long)) == MAX_SHOWN
    assert short_id(long) == short_id("x" * 10_000) != short_id(f"{long}y")
    assert short_id("\ud800" * 100)
