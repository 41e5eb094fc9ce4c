"""What a revision says of its changes: texts for people, without secrets."""

from __future__ import annotations

from dataclasses import replace

from control_harness import backend

from daskserve.control.verbs.history.differences import differences
from daskserve.options.environment import Environment

SCALED = {"autoscaling_config": {"max_replicas": 3, "policy_kwargs": {"token": "s3cret"}}}


def test_each_option_is_named_with_its_values_and_nested_ones_alone() -> None:
    before = backend(config=SCALED)
    wider = {"autoscaling_config": {"max_replicas": 9, "policy_kwargs": {"token": "0ther"}}}
    after = replace(
        backend(version="v2", config={**wider, "max_ongoing_requests": 7}), user_config=b"pickled"
    )
    found = {each.what: (each.old, each.new) for each in differences("model", before, after)}
    assert found["code"] == ("v1", "v2")
    assert found["autoscaling_config.max_replicas"] == ("3", "9")
    assert found["max_ongoing_requests"][1] == "7"
    assert found["user_config"][0] == ""
    assert found["user_config"][1].startswith("#")


def test_no_secret_is_shown() -> None:
    before = backend(config=SCALED)
    other = {"autoscaling_config": {"max_replicas": 3, "policy_kwargs": {"token": "0ther"}}}
    env = Environment(env_vars={"KEY": "s3cret"}).to_text()
    text = repr(list(differences("model", before, replace(backend(config=other), env=env))))
    assert "KEY" in text
    assert "s3cret" not in text
    assert "0ther" not in text


def test_what_comes_and_goes_is_named_with_its_version() -> None:
    (created,) = differences("model", None, backend())
    (removed,) = differences("model", backend(), None)
    assert (str(created), created.new) == ("model: created", "v1")
    assert (str(removed), removed.old) == ("model: removed", "v1")
