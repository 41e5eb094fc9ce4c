"""User code is pickled without what belongs to this process alone; the rest is found and named."""

import asyncio
import threading
import traceback
from types import FunctionType
from typing import Annotated, Any, Optional

import pytest
from fastapi import APIRouter, Depends, FastAPI
from httpx import ASGITransport, AsyncClient, Response
from pydantic import BaseModel
from starlette.applications import Starlette

from daskserve.client.specs import make_spec
from daskserve.errors import BadRequestError
from daskserve.internals.pydantic import NAMESPACE, needed_namespace
from daskserve.payload.pickling import dump, dump_bytes, find_unpicklable, load, load_bytes

pytestmark = pytest.mark.smoke

LOCK_IN_MODULE = threading.Lock()


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
    assert load(dump(Item(name="a"))).model_dump() == {"name": "a", "price": 1}
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
    def __init__(self) -> None:
        self.guards = [threading.Lock()]


def unpicklable() -> dict[str, tuple[Any, str]]:
    lock, model = threading.Lock(), Model()

    def uses_a_lock() -> Any:
        return lock

    def uses_a_model() -> Any:
        return model.guards

    def uses_nothing_yet() -> Any:
        return later

    def uses_the_module() -> Any:
        return LOCK_IN_MODULE

    class Holder:
        guard = lock

    app = Starlette()
    app.state.lock = lock
    router, routed = APIRouter(), FastAPI()
    router.get("/")(uses_a_lock)
    routed.include_router(router)
    by_value = FunctionType(uses_the_module.__code__, {"LOCK_IN_MODULE": lock}, "by_value")
    by_value.__qualname__ = "by_value"
    scope = "unpicklable.<locals>."
    cases = {
        "closure": (uses_a_lock, f"variable 'lock' of function {scope}uses_a_lock"),
        "route": (routed, f"variable 'lock' of function {scope}uses_a_lock"),
        "attribute": (
            uses_a_model,
            f"attribute 'guards' of a Model, in variable 'model' of function {scope}uses_a_model",
        ),
        "global": (by_value, "variable 'LOCK_IN_MODULE' of function by_value"),
        "class": (Holder, f"attribute 'guard' of class {scope}Holder"),
        "state": (
            app,
            "item 'lock' of a dict, in attribute '_state' of a State, in attribute 'state' of a Starlette",
        ),
        "itself": (lock, ""),
        "picklable": (uses_nothing_yet, ""),
    }
    cases["both"] = ((uses_nothing_yet, Holder), cases["class"][1])
    later = None
    return cases


@pytest.mark.parametrize("case", sorted(unpicklable()))
def test_what_cannot_be_pickled_is_named(case: str) -> None:
    value, expected = unpicklable()[case]
    assert find_unpicklable(value) == expected


def test_the_error_of_a_deploy_names_the_variable_and_the_remedies() -> None:
    app, expected = unpicklable()["route"]
    with pytest.raises(BadRequestError) as caught:
        make_spec("tag", app, (), {}, actor_options=None, config=None, timeout_s=None)
    message = str(caught.value)
    assert f"lock' object ({expected}). Create such objects where the replica runs" in message
    assert "__init__" in message
    assert '"module:name"' in message


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
