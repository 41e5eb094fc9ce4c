"""The controller's records and publications about multiplexed models."""

from __future__ import annotations

from typing import Any

import pytest

from daskserve.control.observed.multiplexed import MAX_SHOWN, MultiplexedModels

pytestmark = pytest.mark.smoke


def facts(**models: str) -> dict[str, Any]:
    return {"models": models, "count": len(models), "capacity": 3, "load_s": 0.1}


def test_routers_get_what_has_changed_and_only_that() -> None:
    known = MultiplexedModels()
    assert known.learn("app/d", "app/d#1", facts(a="loaded", b="loading"))
    assert known.take_changes() == {
        "models/app/d": {"app/d#1": {"loaded": ["a"], "coming": ["b"], "capacity": 3}}
    }
    # The order only shows which model was used last.
    assert not known.learn("app/d", "app/d#1", facts(b="loading", a="loaded"))
    assert known.take_changes() == {}
    assert known.learn("app/d", "app/d#1", facts(b="loaded", a="loaded"))
    known.forget_replica("app/d#1")
    assert known.take_changes() == {"models/app/d": None}
    known.forget_replica("app/d#1")
    assert known.take_changes() == {}


def test_the_status_names_the_models_used_last() -> None:
    known = MultiplexedModels()
    assert known.of("app/d#1") == {}
    known.learn("app/d", "app/d#1", facts(**{f"m{number}": "loaded" for number in range(1000)}))
    shown = known.of("app/d#1")
    assert (shown["count"], shown["capacity"], len(shown["models"])) == (1000, 3, MAX_SHOWN)
    assert next(iter(shown["models"])) == "m0"
