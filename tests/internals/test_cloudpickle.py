"""User code is pickled without objects that only this process can use; other such objects are named."""

import asyncio
import functools
import logging
import os
import queue
import re
import socket
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Annotated, Any, Optional

import pytest
from fastapi import APIRouter, Depends, FastAPI
from httpx import ASGITransport, AsyncClient, Client, Response
from pydantic import BaseModel
from starlette.applications import Starlette

from daskserve.client.definitions.specs import make_spec
from daskserve.errors import UnpicklableError
from daskserve.internals.pydantic import NAMESPACE, needed_namespace
from daskserve.payload.pickling import dump, dump_bytes, load_bytes
from daskserve.payload.unpicklable import dump_option

pytestmark = pytest.mark.smoke


def post(app: Any, path: str, body: Any) -> Response:
    async def ask() -> Response:
        async with AsyncClient(transport=ASGITransport(app), base_url="http://test") as client:
            return await client.post(path, json=body)

    return asyncio.run(ask())


def test_a_local_model_leaves_the_variables_of_its_function_behind() -> None:
    lock = threading.Lock()
    locks = [lock]

    class Item(BaseModel):
        name: str
        price: float = 1

    app = FastAPI()

    @app.post("/items")
    def double(item: Item) -> Item:
        return item.model_copy(update={"price": 2 * item.price})

    copied = load_bytes(dump_bytes(app))
    assert post(copied, "/items", {"name": "a", "price": 2}).json() == {"name": "a", "price": 4}
    assert post(copied, "/items", {}).status_code == 422
    # Calls by handle send instances of such models.
    assert dump(Item(name="a")).load().model_dump() == {"name": "a", "price": 1}
    assert Item.__pydantic_parent_namespace__ is not None
    assert locks == [lock]


def test_an_incomplete_model_keeps_the_types_that_it_may_need() -> None:
    locks = [threading.Lock()]

    class Part(BaseModel):
        number: int

    class Whole(BaseModel):
        part: Optional["Part"]
        later: Optional["Later"]  # type: ignore[name-defined]  # noqa: F821

    # pydantic 2.10 and older cannot unpickle an incomplete model.
    dump_bytes((Whole, Part))
    assert list(needed_namespace(Whole)[NAMESPACE]) == ["Part"]
    assert len(locks) == 1


def test_a_router_that_is_included_gets_locks_of_its_own() -> None:
    lock = threading.Lock()

    def one() -> int:
        return 1

    inner, outer, app = APIRouter(), APIRouter(), FastAPI()

    @inner.post("/add")
    def add(number: int, more: Annotated[int, Depends(one)]) -> int:
        return number + more

    outer.include_router(inner, prefix="/inner")
    app.include_router(outer, prefix="/outer")
    for _ in range(2):  # a router caches its routes at the first request
        assert post(app, "/outer/inner/add?number=1", None).json() == 2
        app = load_bytes(dump_bytes(app))
    assert lock.acquire(blocking=False)


class Model:
    def __init__(self, source: Any) -> None:
        self.sources = [{"in": (source,)}]


class Guarded:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class OnlyHere:
    def __reduce__(self) -> str:
        return "ONLY_HERE"


OnlyHere.__module__ = "__main__"
#: A part of the remedy.
OPEN, DEFAULT = "in the __init__ of the class", '"module:name"'


@pytest.fixture
def unpicklable() -> Iterator[dict[str, tuple[Any, str, str]]]:
    """Values, the path to their object that cannot be pickled, and a part of the remedy."""
    with socket.socket() as source, open(os.devnull, "r+") as file, Client() as client:
        yield unpicklable_values(source, file, client)


def unpicklable_values(source: Any, file: Any, client: Any) -> dict[str, tuple[Any, str, str]]:
    model, thread = Model(source), threading.Thread()

    def uses_a_socket() -> Any:
        return source

    def uses_a_model() -> Any:
        return model.sources

    def has_a_default(first: Any, second: Any = source, *, third: Any = None) -> Any: ...

    def depends(found: Annotated[Any, Depends(uses_a_socket)]) -> Any: ...

    def uses_nothing_yet() -> Any:
        return later

    def reads_a_global() -> Any:
        return SOURCE  # type: ignore[name-defined]  # noqa: F821

    class Node: ...

    class Holder:
        guard = source

        @property
        def worker(self) -> Any:
            return thread

    class Derived(Holder):
        guard = None

    class Odd:
        def __reduce__(self) -> Any:
            raise ValueError("not this one.")

    class Slotted:
        __slots__ = ("guard",)

    class Factory:
        @classmethod
        def make(cls) -> Any:
            return source

        def read(self) -> Any: ...

    def wrapper() -> None: ...

    functools.update_wrapper(wrapper, uses_a_socket)

    def has_an_annotation(first: Any) -> None: ...

    has_an_annotation.__annotations__["first"] = source

    def has_an_attribute() -> None: ...

    has_an_attribute.source = source  # type: ignore[attr-defined]

    def makes_a_function() -> Any:
        def inner() -> Any:
            return SOURCE  # type: ignore[name-defined]  # noqa: F821

        return inner

    def has_a_named_default(*, third: Any = source) -> Any: ...

    slotted = Slotted()
    slotted.guard = source  # type: ignore[attr-defined]
    factory = Factory()
    app, router, routed = Starlette(), APIRouter(), FastAPI(openapi_url=None)
    app.state.source = source
    router.get("/", dependencies=[Depends(uses_a_socket)])(uses_nothing_yet)
    routed.get("/")(depends)
    by_value = FunctionType(reads_a_global.__code__, {"SOURCE": source}, "by_value")
    later = None
    a_socket = "is of type socket ("
    parent, child = Node(), Node()
    vars(parent).update(child=child)
    vars(child).update(parent=parent, source=source)
    return {
        "closure": (uses_a_socket, f" -> variable 'source' {a_socket}", OPEN),
        "attribute": (uses_a_model, " -> variable 'model'.sources[0]['in'][0] is of type socket", OPEN),
        "default": (has_a_default, f" -> default of 'second' {a_socket}", OPEN),
        "global": (by_value, f" -> global 'SOURCE' {a_socket}", OPEN),
        "class": (Holder, f".guard {a_socket}", OPEN),
        "property": (Derived, " -> base class unpicklable_values.<locals>.Holder.guard is", OPEN),
        "thread": (
            partial(Derived.worker.fget, None),
            " -> variable 'thread' is of type threading.T",
            "Start",
        ),
        "state": (app, f".state._state['source'] {a_socket}", OPEN),
        "dependency": (
            routed,
            f".routes[0].endpoint (depends) -> annotation of 'found'... -> variable 'source' {a_socket}",
            OPEN,
        ),
        "included": (
            router,
            ".routes[0].dependencies[0].dependency (uses_a_socket) -> variable 'source'",
            OPEN,
        ),
        "itself": (source, f"cannot be pickled: it {a_socket}", OPEN),
        "cycle": (parent, f".child.source {a_socket}", OPEN),
        "name": (
            [OnlyHere()],
            "[0] is of type OnlyHere (It is pickled as the name 'ONLY_HERE'",
            "in a module",
        ),
        "handler": ([logging.StreamHandler()], "[0] is of type logging.StreamHandler (", DEFAULT),
        "coroutine": ({"k": (each for each in "")}, "['k'] is of type generator", "list of its items"),
        "library": ([client], "[0] is of type httpx.Client (", DEFAULT),
        "lock": ([threading.Lock()], "[0] is of type threading.Lock", "Processes cannot share"),
        "lock of an object": ([Guarded()], "[0].lock is of type threading.Lock", DEFAULT),
        "queue": ([queue.Queue()], "[0] is of type queue.Queue", "Processes cannot share"),
        "written": (
            file,
            "it is of type _io.TextIOWrapper (What is written",
            "where it is",
        ),
        "odd": ([Odd()], "Odd (ValueError: not this one). ", DEFAULT),
        "slots": ([slotted], f"[0].guard {a_socket}", OPEN),
        "class method": (Factory, f".make -> variable 'source' {a_socket}", OPEN),
        "method": (factory.read, f".__self__ -> class ...Factory.make -> variable 'source' {a_socket}", OPEN),
        "instance": (Derived(), " -> class ...Derived -> base class ...Holder.guard is", OPEN),
        "wrapped": (wrapper, f".__wrapped__ (uses_a_socket) -> variable 'source' {a_socket}", OPEN),
        "annotation": (has_an_annotation, f" -> annotation of 'first' {a_socket}", OPEN),
        "attribute of a function": (has_an_attribute, f".source {a_socket}", OPEN),
        "inner": (
            FunctionType(makes_a_function.__code__, {"SOURCE": source}, "outer"),
            f" -> global 'SOURCE' {a_socket}",
            OPEN,
        ),
        "named default": (has_a_named_default, f" -> default of 'third' {a_socket}", OPEN),
        "partial": (partial(uses_a_socket), f".func (uses_a_socket) -> variable 'source' {a_socket}", OPEN),
        "deep": ({"a": [[[[[[[[(source,)]]]]]]]]}, f"['a'] ... [0][0][0][0][0][0][0][0] {a_socket}", OPEN),
        "both": ((uses_nothing_yet, Holder), f"[1].guard {a_socket}", OPEN),
    }


def test_unpicklable_values_are_named_with_their_path_and_a_remedy(
    unpicklable: dict[str, tuple[Any, str, str]],
) -> None:
    for name, (value, way, remedy) in unpicklable.items():
        with pytest.raises(UnpicklableError, match="The option it cannot be pickled: it") as caught:
            dump_option("it", value, DEFAULT)
        error = str(caught.value)
        assert re.search(re.escape(way).replace(r"\.\.\.", ".*"), error), (name, error)
        assert remedy in error.rpartition(")")[2], (name, error)


def test_the_error_of_a_deploy_names_the_callable_or_the_argument(
    unpicklable: dict[str, tuple[Any, str, str]],
) -> None:
    app, *_ = unpicklable["dependency"]

    class Any_:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    for definition, args, kwargs, way in (
        (app, (), {}, "FastAPI.routes[0].endpoint"),
        (Any_, (1, [threading.Lock()]), {}, "argument 2[0] is of type threading.Lock"),
        (Any_, (), {"lock": threading.Lock()}, "argument 'lock' is of type threading.Lock"),
    ):
        with pytest.raises(UnpicklableError) as caught:
            make_spec("tag", definition, args, kwargs, actor_options=None, config=None, timeout_s=None)
        assert f"The callable of deployment 'tag', or one of its arguments, cannot be pickled: {way}" in str(
            caught.value
        )


class TopLevel(BaseModel):
    number: int


def test_a_model_at_the_top_level_of_a_program_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopLevel, "__module__", "__main__")  # so that it is pickled by value
    assert load_bytes(dump_bytes(TopLevel(number=3))).number == 3


def test_code_keeps_the_name_of_its_file_so_that_tracebacks_show_its_lines() -> None:
    def fail() -> None:
        raise ValueError("here")

    copied = load_bytes(dump_bytes(fail))
    assert copied.__code__ is not fail.__code__
    with pytest.raises(ValueError, match="here") as caught:
        copied()
    assert 'raise ValueError("here")' in "".join(traceback.format_exception(caught.value))


def test_code_of_a_notebook_has_the_same_bytes_in_each_process() -> None:
    def pickled(cell: str) -> bytes:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile("def answer():\n    return (lambda: 42)()", cell, "exec"), names)
        return dump_bytes(names["answer"])

    assert pickled("/tmp/ipykernel_1/2345.py") == pickled("/tmp/ipykernel_6/2345.py")
