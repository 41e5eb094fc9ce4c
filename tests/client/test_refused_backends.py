"""Backends that cannot be created: a quick error, nothing is left, and the call can be repeated."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from dask_processes import poll_for, within

import daskserve as serve
from daskserve.errors import NoCapacityError, ReplicaStartError


def assert_nothing_created(client: serve.Client) -> None:
    assert client.list_backends() == {}
    assert client.list_endpoints() == {}
    # The rollback may still be stopping replicas.
    poll_for(lambda: not client.status().backends and not client.status().replicas(), 3)


def assert_works(client: serve.Client, tag: str) -> None:
    """Check that the same name works with a valid callable."""
    client.create_backend(tag, lambda request: "good")
    client.create_endpoint(tag, backend=tag)
    assert client.get_handle(tag).remote().result(10) == "good"


def test_a_raising_constructor_fails_the_deploy(client: serve.Client) -> None:
    """The error contains the reason and the user's traceback."""

    class Raising:
        def __init__(self, path: str) -> None:
            raise FileNotFoundError(f"no model at {path}")

        def __call__(self, request: Any) -> str:
            return "never"

    with pytest.raises(
        ReplicaStartError, match=r"'tag'.*FileNotFoundError: no model at model\.pkl"
    ) as caught:
        with within(5):
            client.create_backend("tag", Raising, "model.pkl")
    assert "raise FileNotFoundError" in caught.value.user_traceback
    assert_nothing_created(client)
    assert_works(client, "tag")


def test_an_unpicklable_callable_is_refused(client: serve.Client) -> None:
    thread = threading.Thread()

    def holds_a_thread(request: Any) -> str:
        return thread.name

    class Plain:
        def __init__(self, argument: Any) -> None: ...

        def __call__(self, request: Any) -> str:
            return "never"

    for definition, arguments in ((holds_a_thread, ()), (Plain, (thread,))):
        with pytest.raises(ValueError, match=r"'tag'.*cannot be pickled.*threading\.Thread.*__init__"):
            client.create_backend("tag", definition, *arguments)
    assert_nothing_created(client)
    assert_works(client, "tag")


def test_a_bad_import_path_is_refused(client: serve.Client) -> None:
    for path, message in (
        ("no_such_module.Name", "no module 'no_such_module'"),
        ("served.no_such_name", "served has no 'no_such_name'"),
        ("served", "'pkg.mod.Name'"),
        ("", "'pkg.mod.Name'"),
        ("served.__doc__", "must name something to serve"),
    ):
        with pytest.raises(serve.errors.ServeError, match=message), within(5):
            client.create_backend("tag", path)
        assert_nothing_created(client)
    assert_works(client, "tag")


def test_a_deploy_without_room_fails_in_time(client: serve.Client) -> None:
    """The error names the missing resource, shortly after ``timeout_s``."""
    with pytest.raises(NoCapacityError, match=r"unicorns.*within 0.5 s|within 0.5 s.*unicorns"), within(4):
        client.create_backend(
            "tag", "served.echo", actor_options={"resources": {"unicorns": 1}}, timeout_s=0.5
        )
    assert_nothing_created(client)
    assert_works(client, "tag")


def test_a_deploy_without_room_for_all_replicas_is_rolled_back(client: serve.Client) -> None:
    """Replicas that fit are removed with the rest; a failed update restores the previous state."""
    options = {"num_cpus": 1}
    with pytest.raises(NoCapacityError, match="'tag' to 9 replicas within 1 s"), within(4):
        client.create_backend(
            "tag", "served.echo", config={"num_replicas": 9}, actor_options=options, timeout_s=1
        )
    assert_nothing_created(client)
    client.create_backend("tag", "served.echo", config={"num_replicas": 3}, actor_options=options)
    with pytest.raises(NoCapacityError, match="'tag' to 9 replicas within 1 s"), within(4):
        client.update_backend_config("tag", {"num_replicas": 9}, timeout_s=1)
    assert client.get_backend_config("tag").num_replicas == 3
    poll_for(lambda: len(client.status().replicas()) == 3, 3)


def test_a_slow_constructor_times_out(client: serve.Client, tmp_path: Path) -> None:
    """A constructor that takes longer than ``timeout_s`` is abandoned, and nothing waits for it."""
    go = tmp_path / "go"

    class Slow:
        def __init__(self) -> None:
            poll_for(go.exists)

        def __call__(self, request: Any) -> str:
            return "never"

    with pytest.raises(serve.errors.ServeError, match=r"'tag'.*within 0.5 s.*larger timeout_s"), within(4):
        client.create_backend("tag", Slow, timeout_s=0.5)
    assert client.list_backends() == {}
    assert_works(client, "tag")
    go.touch()
