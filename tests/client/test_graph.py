"""Applications as graphs: their order and names, the values sent in place of handles, and mistakes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pytest
from tables import each_case

import daskserve as serve
from daskserve.client.definitions.graph import ApplicationGraph
from daskserve.common.types import SHARED_BYTES
from daskserve.context import ReplicaContext, current_replica
from daskserve.data.caller.calls.handle import Handle
from daskserve.errors import BadRequestError, ClosedError, UnpicklableError
from daskserve.options.specs import ApplicationSpec
from daskserve.payload.parcels import unpack_code


@serve.deployment
class Model:
    def __init__(self, *values: Any) -> None:
        self.values = values

    def __call__(self) -> Any:
        return self.values

    def greet(self) -> str:
        return "hello"


@serve.deployment
class Caller:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def __call__(self) -> None: ...


@dataclass
class Config:
    model: Any
    size: int = 1


GLOBAL_APPLICATION = Model.bind()


def spec(application: serve.Application, name: str = "default", **options: Any) -> ApplicationSpec:
    return ApplicationGraph(application, name).spec(route="/", request_id="r", **options)


def versions(found: ApplicationSpec) -> dict[str, str | None]:
    return {each.name: each.spec.version for each in found.deployments}


def arguments(found: ApplicationSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a replica of the ingress is constructed."""
    part = found.ingress.spec
    token = current_replica.set(ReplicaContext("instance", part.tag, f"{part.tag}#1"))
    try:
        _, args, kwargs = unpack_code(part.code, part.parts)
    finally:
        current_replica.reset(token)
    return args, kwargs


def endpoint(handle: Handle) -> tuple[str, str]:
    return handle._endpoint, handle._options.method_name


def test_deployments_come_after_those_that_they_need() -> None:
    low = Model.bind()
    middle = Caller.options(name="middle").bind(low)
    found = spec(Caller.options(name="top").bind(middle, low), "shop")
    assert [each.name for each in found.deployments] == ["Model", "middle", "top"]
    assert [each.needs for each in found.deployments] == [(), ("shop/Model",), ("shop/middle", "shop/Model")]
    assert found.ingress.spec.tag == "shop/top"
    assert found.deployments[0].python_methods == ("greet",)


def test_one_application_is_deployed_once_and_two_of_a_name_are_numbered() -> None:
    one = Model.bind()
    found = spec(Caller.bind(one, Model.bind(), [one], other=Model.bind()))
    assert [each.name for each in found.deployments] == ["Model", "Model_1", "Model_2", "Caller"]


def test_a_numbered_name_that_is_taken_is_passed_over() -> None:
    found = spec(Caller.bind(Model.options(name="Model_1").bind(), Model.bind(), Model.bind()))
    assert [each.name for each in found.deployments] == ["Model_1", "Model", "Model_2", "Caller"]


def test_handles_arrive_wherever_an_application_was_bound() -> None:
    model = Model.bind()
    shared = [model]
    args, kwargs = arguments(
        spec(Caller.bind([shared, (model,)], shared, {"k": {model}}, config=Config(model), m=model.greet))
    )
    assert args[0][0] is args[1]
    (in_a_set,) = args[2]["k"]
    handles = [args[1][0], args[0][1][0], in_a_set, kwargs["config"].model]
    assert {endpoint(each) for each in handles} == {("Model", "__call__")}
    assert len({id(each) for each in handles}) == 1
    assert endpoint(kwargs["m"]) == ("Model", "greet")
    assert handles[0]._instance == "instance"


def test_a_handle_calls_methods_that_it_does_not_know_yet() -> None:
    """The pickle has nothing about the other deployment: callers need no restart when it gets new methods."""
    ((handle,), _) = arguments(spec(Caller.bind(Model.bind())))
    assert endpoint(handle.anything) == ("Model", "anything")
    with pytest.raises(AttributeError):
        _ = handle._private


def test_arguments_unpickled_outside_of_replicas_can_be_deployed_again() -> None:
    first = spec(Caller.bind(Model.bind()))
    _, args, _ = unpack_code(first.ingress.spec.code, ())
    with pytest.raises(ClosedError, match="'Model' is an argument of a deployment"):
        args[0].remote()
    again = spec(Caller.bind(*args))
    assert versions(again) == {"Caller": versions(first)["Caller"]}


def test_a_handle_among_the_arguments_travels_without_its_instance() -> None:
    handle = Handle("mine", "elsewhere", is_legacy=False).options(timeout_s=3)
    ((arrived,), _) = arguments(spec(Caller.bind(handle), instance="mine"))
    assert (arrived._instance, arrived._endpoint) == ("instance", "elsewhere")
    assert arrived._options.timeout_s == 3
    ((foreign,), _) = arguments(spec(Caller.bind(handle), instance="other"))
    assert foreign._instance == "mine"


# ---- versions


def made(value: Any = 1) -> serve.Application:
    return Caller.bind(Model.bind(value), ["text", b"bytes", 1.5, ("text",)], key=Config(Model.bind(2)))


def test_unchanged_code_has_the_same_version() -> None:
    application = made()
    assert versions(spec(application)) == versions(spec(application)) == versions(spec(made()))
    large = Model.bind(np.zeros(SHARED_BYTES, np.uint8))
    assert versions(spec(large)) == versions(spec(large))


def test_equal_texts_need_not_be_the_same_object() -> None:
    text = "one text"
    copies = ["".join(list(text)) for _ in range(2)]
    assert copies[0] is not copies[1]
    assert versions(spec(Model.bind(text, text))) == versions(spec(Model.bind(*copies)))


def test_objects_that_are_one_differ_from_equal_ones() -> None:
    one: list[int] = []
    assert versions(spec(Model.bind(one, one))) != versions(spec(Model.bind([], [])))


@each_case("value", [2, "1", 1.0, b"1", None, [1]])
def test_another_argument_is_another_version_of_that_deployment_only(value: Any) -> None:
    before, after = versions(spec(made())), versions(spec(made(value)))
    assert {name for name in before if before[name] != after[name]} == {"Model"}


def test_a_large_argument_that_changes_is_another_version() -> None:
    array = np.zeros(SHARED_BYTES, np.uint8)
    before = versions(spec(Model.bind(array)))
    array[-1] = 1
    assert versions(spec(Model.bind(array))) != before


def test_a_version_that_the_user_names_is_kept() -> None:
    part = spec(Model.options(version="7").bind()).ingress.spec
    assert (part.version, part.user_version) == ("7", "7")
    assert spec(Model.bind()).ingress.spec.user_version is None


#: Deploys objects that pickle writes in a different order, or with different names, in each process.
PROGRAM = """
import enum
import functools
import threading
from typing import Generic, TypeVar

from pydantic import BaseModel
import daskserve as serve
from daskserve.client.definitions.graph import ApplicationGraph

class Item(BaseModel):
    number: int

T = TypeVar("T")
lock = threading.Lock()

class Base(Generic[T]):
    words = {"a", "b", "c", "d"}

class Color(enum.Enum):
    RED = 1
    BLUE = 2
    GREEN = 3

WARM = {Color.RED, Color.BLUE, Color.GREEN}
NEXT = {Color.RED: {Color.BLUE, Color.GREEN, Color.RED}}

@functools.singledispatch
@functools.cache
def is_known(word):
    with lock:
        return WARM and NEXT and word in {"alpha", "beta", "gamma", "delta"}

@serve.deployment
class Model(Base[int]):
    pairs = {("a", 1), ("b", 2), ("c", 3)}

    def __call__(self, word, known=frozenset({Color.RED, Color.BLUE, Color.GREEN})):
        return Item(number=is_known(word))

bound = Model.bind({"x", "y", "z"}, {("x", "y"), ("z", "z")}, Item(number=1))
found = ApplicationGraph(bound, "a").spec(route="/", request_id="")
print(found.ingress.spec.version)
"""


def test_the_same_program_has_the_same_versions_each_time_it_runs() -> None:
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert ended.stdout, ended.stderr
        found.add(ended.stdout)
    assert len(found) == 1


CELL = """
import daskserve as serve

class Item:
    number = NUMBER

@serve.deployment
class Cell:
    def __call__(self, request):
        return Item()
"""


def test_a_cell_that_runs_again_is_a_new_version_only_if_its_code_has_changed() -> None:
    cells = []
    for number in (1, 1, 2, 1):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(CELL.replace("NUMBER", str(number)), names)
        cells.append((names, spec(names["Cell"].bind()).ingress.spec.version))
    versions = [version for _, version in cells]
    assert versions[0] == versions[1] == versions[3] != versions[2]
    item = cells[-1][0]["Item"]
    # The name means the last definition, also for what replicas with the first one return.
    assert cloudpickle.loads(cloudpickle.dumps(item)) is item
    assert cloudpickle.loads(cloudpickle.dumps(cells[0][0]["Item"])) is item


def test_two_classes_of_one_code_stay_two_classes() -> None:
    def make() -> Any:
        class Same: ...

        return Same

    first, second = make(), make()
    spec(Model.bind(first))
    spec(Model.bind(second))
    one, two = (cloudpickle.loads(cloudpickle.dumps(each)) for each in (first, second))
    assert one is first
    assert two is second


# ---- mistakes


def cycle() -> serve.Application:
    inside: list[Any] = []
    application = Caller.options(name="first").bind(inside)
    inside.append(Caller.options(name="second").bind(application))
    return application


def uses_a_global() -> serve.Application:
    def code() -> Any:
        return GLOBAL_APPLICATION

    code.__module__ = "__main__"  # so that it is pickled by value
    return serve.deployment(code).bind()


@each_case(
    ("make", "error", "match"),
    [
        (cycle, BadRequestError, "cycle: 'first' needs 'second' needs 'first'"),
        (
            lambda: Caller.bind(Config(Model)),
            TypeError,
            r"'Caller' has the deployment 'Model' as an argument, which is not bound; pass Model.bind",
        ),
        (
            uses_a_global,
            BadRequestError,
            r"refers to application 'Model' \(code -> global 'GLOBAL_APPL",
        ),
        (
            lambda: Caller.bind(Model.bind(), lambda: GLOBAL_APPLICATION),
            BadRequestError,
            "Pass it to bind",
        ),
        (
            lambda: Caller.bind(Model.bind(threading.Lock())),
            UnpicklableError,
            "The callable of deployment 'Model', or one of its arguments, cannot be pickled",
        ),
        (lambda: Caller.bind(Model.options(name="").bind()), BadRequestError, "name must not be empty"),
    ],
)
def test_a_mistake_in_a_graph_is_one_clear_error(
    make: Callable[[], serve.Application], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        spec(make())


def test_names_of_applications_are_checked() -> None:
    with pytest.raises(BadRequestError, match="name must not be empty"):
        spec(Model.bind(), "")
    with pytest.raises(TypeError, match="name must be a string, got 3"):
        spec(Model.bind(), 3)  # type: ignore[arg-type]


def test_an_application_has_the_methods_of_its_class() -> None:
    assert repr(Model.bind().greet) == "<method 'greet' of application 'Model'>"
    with pytest.raises(AttributeError, match=r"Application 'Model' has no method 'gret'; it has: greet\."):
        _ = Model.bind().gret
    assert serve.deployment("os.path.basename").bind().anything.name == "anything"


def test_an_application_can_be_copied_and_pickled() -> None:
    application = Caller.bind("x", Model.bind())
    for copied in (copy.deepcopy(application), cloudpickle.loads(cloudpickle.dumps(application))):
        assert [each.name for each in spec(copied).deployments] == ["Model", "Caller"]
