"""Records: values survive a round trip, and errors name unreadable records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from control_harness import backend, endpoint, goal, replica
from hypothesis import given
from hypothesis import strategies as st
from tables import each_case

from daskserve.common.types import ActorAddress, ReplicaState
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.records import (
    AppRecord,
    BackendRecord,
    CodeRecord,
    EndpointRecord,
    GoalRecord,
    GoalState,
    Record,
    ReplicaRecord,
    to_plain,
)
from daskserve.control.records.storing.encoding import FORMAT, CorruptRecordError, decode, encode, from_plain
from daskserve.options.actor import ActorOptions
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.backend import BackendConfig, BackendMetadata

names = st.text(min_size=1, max_size=10)
numbers = st.integers(0, 2**48)
amounts = st.dictionaries(names, st.floats(0, 100), max_size=3)
maybe_bytes = st.none() | st.binary(max_size=20)
configs = st.builds(
    BackendConfig,
    max_batch_size=st.none() | st.integers(1, 2**48),
    batch_wait_timeout=st.floats(0, 100),
    autoscaling_config=st.none() | st.builds(AutoscalingConfig, max_replicas=st.integers(1, 1000)),
    internal_metadata=st.builds(BackendMetadata, class_name=names),
)
backends = st.builds(
    BackendRecord,
    tag=names,
    version=names,
    code_key=names,
    config=configs,
    config_id=names,
    actor_options=st.builds(ActorOptions, num_cpus=st.floats(0, 100), resources=amounts),
    env=st.none() | names,
    user_config=maybe_bytes,
    request_id=names,
    user_version=st.none() | names,
    deployed_at=st.floats(0, 1e10),
    last_error=st.text(max_size=10),
    goal=st.none() | names,
    is_deleting=st.booleans(),
    is_forced=st.booleans(),
    is_deployment=st.booleans(),
    application=names,
    needs=st.lists(names, max_size=3).map(tuple),
)
methods = st.lists(names, max_size=3).map(tuple)
endpoints = st.builds(
    EndpointRecord,
    name=names,
    route=st.none() | names,
    methods=methods,
    traffic=amounts,
    shadows=amounts,
    request_id=names,
    is_legacy=st.booleans(),
    python_methods=methods,
)
records: st.SearchStrategy[Record] = st.one_of(
    backends,
    st.builds(CodeRecord, name=names, backend=names, code=st.binary(max_size=50)),
    st.builds(
        ReplicaRecord,
        tag=names,
        backend=names,
        version=names,
        config_id=names,
        state=st.sampled_from(ReplicaState),
        demand=amounts,
        worker=st.none() | names,
        incarnation=numbers,
        is_forced=st.booleans(),
    ),
    endpoints,
    st.builds(ProxyRecord, name=names, worker=names, host=names, incarnation=numbers, port=numbers),
    st.builds(
        GoalRecord,
        goal_id=names,
        backend=names,
        state=st.sampled_from(GoalState),
        number=numbers,
        timeout_s=st.none() | st.floats(0, 1e6),
        previous=st.dictionaries(
            names, st.none() | backends.map(to_plain) | endpoints.map(to_plain), max_size=2
        ),
        failures=st.dictionaries(names, numbers, max_size=2),
        error=maybe_bytes,
        application=names,
    ),
    st.builds(
        AppRecord,
        name=names,
        route=st.none() | names,
        deployments=st.dictionaries(names, names, max_size=3),
        request_id=names,
        deployed_at=st.floats(0, 1e10),
        goal=st.none() | names,
        last_error=names,
        failed=names,
        is_deleting=st.booleans(),
    ),
)


@given(records)
def test_every_record_comes_back_from_its_bytes(record: Record) -> None:
    found = decode(record.key, encode(record))
    assert found == record
    assert type(found) is type(record)


@given(backends)
def test_a_backend_comes_back_from_the_plain_values_in_a_goal(record: BackendRecord) -> None:
    assert from_plain("backend", to_plain(record)) == record


def test_states_and_methods_come_back_in_their_types() -> None:
    found = decode("replica/b#1", encode(replica("b#1")))
    assert isinstance(found, ReplicaRecord)
    assert found.state is ReplicaState.RUNNING
    finished = decode("goal/g", encode(goal(state=GoalState.FAILED)))
    assert isinstance(finished, GoalRecord)
    assert finished.state is GoalState.FAILED
    there = decode("endpoint/e", encode(endpoint(methods=("GET", "PUT"))))
    assert isinstance(there, EndpointRecord)
    assert there.methods == ("GET", "PUT")


def fields(**changes: Any) -> bytes:
    found = msgpack.unpackb(encode(backend()))
    found["fields"].update(changes)
    return bytes(msgpack.packb(found))


@each_case(
    ("key", "data"),
    [
        ("backend/b", b""),
        ("backend/b", b"\xc1 never valid"),
        ("backend/b", msgpack.packb(7)),
        ("backend/b", msgpack.packb({"fields": {}})),
        ("backend/b", msgpack.packb({"format": "new", "fields": {}})),
        ("backend/b", msgpack.packb({"format": FORMAT})),
        ("backend/b", msgpack.packb({"format": FORMAT, "fields": {"tag": "b"}})),
        ("backend/b", fields(colour="red")),
        ("backend/b", encode(backend())[:-3]),
        ("replica/b#1", encode(backend())),
        (
            "replica/b#1",
            msgpack.packb({"format": FORMAT, "fields": {**to_plain(replica("b#1")), "state": "?"}}),
        ),
        ("unknown/b", encode(backend())),
    ],
)
def test_unreadable_records_are_named(key: str, data: bytes) -> None:
    with pytest.raises(CorruptRecordError, match=f"Record '{key}' cannot be read"):
        decode(key, data)


@given(st.binary(max_size=200), st.sampled_from(["backend/b", "goal/g", "endpoint/e", "proxy/p"]))
def test_garbage_is_never_anything_else_than_corrupt(data: bytes, key: str) -> None:
    with pytest.raises(CorruptRecordError):
        decode(key, data)


def test_a_newer_format_says_what_to_do() -> None:
    data = msgpack.packb({"format": FORMAT + 1, "fields": {}})
    with pytest.raises(
        CorruptRecordError, match=f"has format {FORMAT + 1}; .* reads up to {FORMAT}. Use a newer"
    ):
        decode("backend/b", data)


def test_a_field_that_an_older_version_did_not_write_has_its_default() -> None:
    old = msgpack.unpackb(encode(backend()))
    del old["fields"]["is_deployment"]
    found = decode("backend/b", msgpack.packb(old))
    assert found == backend()


@each_case("is_new", [True, False])
def test_a_goal_of_an_earlier_version_covers_its_backend(is_new: bool) -> None:
    """Such a goal has one backend, and the records of the backend and its endpoint before the change."""
    before, route = backend(num_replicas=2), endpoint("b", "/b")
    old = {
        "goal_id": "g",
        "backend": "b",
        "state": "PENDING",
        "number": 4,
        "timeout_s": 60.0,
        "previous": None if is_new else to_plain(before),
        "failures": 2,
        "error": None,
        "previous_endpoint": None if is_new else to_plain(route),
    }
    found = decode("goal/g", msgpack.packb({"format": 1, "fields": old}))
    assert isinstance(found, GoalRecord)
    assert found.failures == {"b": 2}
    assert found.previous == (
        {"backend/b": None} if is_new else {"backend/b": to_plain(before), "endpoint/b": to_plain(route)}
    )


def test_an_ended_goal_of_an_earlier_version_restores_nothing() -> None:
    old = {"goal_id": "g", "backend": "b", "state": "DONE", "number": 4, "timeout_s": None}
    old |= {"previous": None, "failures": 0, "error": None}
    found = decode("goal/g", msgpack.packb({"format": 1, "fields": old}))
    assert found == goal(state=GoalState.DONE, number=4, timeout_s=None)


def test_keys_are_kind_and_name() -> None:
    proxy = ProxyRecord("head", "w1", "h1", 3, 8000)
    made: list[Record] = [backend(), CodeRecord("b@1", "b", b""), replica("b#1"), endpoint(), proxy, goal()]
    assert [each.key for each in made] == [
        "backend/b",
        "code/b@1",
        "replica/b#1",
        "endpoint/e",
        "proxy/head",
        "goal/g",
    ]


def test_addresses_name_the_instance_and_the_incarnation() -> None:
    assert replica("b#1", worker="w2", incarnation=7).address("i") == ActorAddress("i/replica/b#1", "w2", 7)
    proxy = ProxyRecord("head", "w1", "h1", 3, 80)
    assert proxy.address("i") == ActorAddress("i/proxy/head/3", "w1", 3)
    assert (proxy.key, replace(proxy, is_leaving=True).key) == ("proxy/head", "proxy/head@3")
    with pytest.raises(ValueError, match="has no worker"):
        replace(proxy, worker=None).address("i")
    with pytest.raises(ValueError, match="b#1 has not been placed"):
        replica("b#1", ReplicaState.SHOULD_START).address("i")
