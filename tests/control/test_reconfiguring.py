"""The ids of configs: the differences between two of them, and whether they mean the same config."""

from __future__ import annotations

from daskserve.control.records.config_ids import UNKNOWN_CONFIG, config_id, in_doubt, is_same
from daskserve.options.backend import BackendConfig


def identity(user_config: bytes | None = None, concurrency: int = 4) -> str:
    return config_id(BackendConfig(max_concurrent_queries=concurrency), user_config)


def test_an_id_says_whether_user_code_has_to_be_called() -> None:
    assert len({identity(), identity(b""), identity(b"a"), identity(b"a", 5), identity(b"b")}) == 5
    assert in_doubt(identity(b"a"), identity(b"b")) == UNKNOWN_CONFIG
    assert in_doubt(identity(None), identity(b"")) == UNKNOWN_CONFIG
    options_only = in_doubt(identity(b"a"), identity(b"a", 5))
    assert options_only not in (UNKNOWN_CONFIG, identity(b"a"), identity(b"a", 5))
    assert in_doubt(options_only, identity(b"a", 6)) == options_only
    assert in_doubt(options_only, identity(b"b")) == UNKNOWN_CONFIG
    assert in_doubt(UNKNOWN_CONFIG, identity(b"a")) == UNKNOWN_CONFIG


def test_ids_of_earlier_releases_are_recognized() -> None:
    """They have no separate part for the user's config."""
    old = identity(b"a").partition("-")[0]
    assert is_same(old, identity(b"a"))
    assert is_same(identity(b"a"), old)
    assert not is_same(old, identity(b"b"))
    assert not is_same(identity(b"a"), identity(b"b"))
    assert not is_same(UNKNOWN_CONFIG, identity(b"a"))
    assert in_doubt(old, identity(b"a", 5)) == UNKNOWN_CONFIG  # which config it was sent is unknown
