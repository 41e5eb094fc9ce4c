"""A program whose functions are pickled by value: each case uses what the program defines.

Run as ``python program_by_value.py FILE``, it writes the pickled cases and their results to the file.
"""

import abc
import asyncio
import contextlib
import contextvars
import dataclasses
import enum
import functools
import logging
import pickle
import queue
import random
import sqlite3
import sys
import threading
import typing
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from os import environ
from typing import Annotated, Any, Generic, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

import httpx
import pydantic
from fastapi import Depends, FastAPI
from pydantic import BaseModel, Field, computed_field
from typing_extensions import TypedDict

if __name__ == "__main__":
    import json as chosen

T = TypeVar("T")
P = ParamSpec("P")
Ts = typing.TypeVarTuple("Ts")
UserId = typing.NewType("UserId", int)
CASES: list[Callable[[], Any]] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES.append(function)
    return function


# ---- functions


@functools.lru_cache(maxsize=7, typed=True)
def cached(number: int) -> int:
    return number + 1


@functools.cache
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


cached(1)
cached.note = "mine"


@case
def caches_are_empty_and_keep_their_parameters() -> Any:
    before = cached.cache_info().currsize if __name__ != "__main__" else 0
    return before, cached(2), cached.cache_parameters(), cached.note, fibonacci(50)


@functools.singledispatch
def kind_of(value: Any) -> str:
    return "object"


@kind_of.register
def _(value: int) -> str:
    return "int, not " + kind_of(1.0)


@kind_of.register(str)
def _(value: Any) -> str:
    return "str"


class Kinds:
    @functools.singledispatchmethod
    def kind_of(self, value: Any) -> str:
        return "object"

    @kind_of.register
    def _(self, value: int) -> str:
        return "int"


@case
def functions_dispatch_on_types() -> Any:
    return kind_of(1), kind_of("a"), kind_of(None), kind_of(True), Kinds().kind_of(1), Kinds().kind_of(None)


def twice(function: Callable[P, int]) -> Callable[P, int]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> int:
        return 2 * function(*args, **kwargs)

    return wrapper


@twice
def decorated(number: int, *, more: int = 0) -> int:
    "A document."
    return number + more


partly = functools.partial(decorated, 4, more=1)


@contextlib.contextmanager
def opened() -> Any:
    yield "opened"


async def numbers() -> AsyncIterator[int]:
    for number in range(3):
        yield number


@case
def functions_of_all_kinds() -> Any:
    async def collected() -> list[int]:
        return [each async for each in numbers()]

    with opened() as text:
        return partly(), decorated.__doc__, decorated.__wrapped__(1), text, asyncio.run(collected())


# ---- variables


tenant = contextvars.ContextVar("tenant", default="nobody")
unset: contextvars.ContextVar[int] = contextvars.ContextVar("unset")
tenant.set("of this program")


@case
def context_variables_have_their_defaults() -> Any:
    def read() -> Any:
        with contextlib.suppress(LookupError):
            return unset.get()
        return tenant.name, tenant.get()

    return contextvars.Context().run(read)


lock, rlock, locks = threading.Lock(), threading.RLock(), {"a": [threading.Lock()]}
condition, semaphore, event = threading.Condition(), threading.BoundedSemaphore(2), threading.Event()
jobs, simple, local = queue.PriorityQueue[int](), queue.SimpleQueue[int](), threading.local()
pool = ThreadPoolExecutor(2, "crew")
async_lock, limit = asyncio.Lock(), asyncio.Semaphore(1)
event.set()
jobs.put(5)


class Attributes(threading.local):
    def __init__(self) -> None:
        self.number = 3


attributes = Attributes()


@case
def locks_are_free_and_queues_keep_their_items() -> Any:
    def name(_: Any = lock) -> str:
        return threading.current_thread().name

    async def ask() -> int:
        async with async_lock, limit:
            return 1

    local.x = attributes.number
    with lock, rlock, locks["a"][0], condition, semaphore, pool:
        jobs.put(jobs.get() + 1)
        simple.put(jobs.get())
        return event.is_set(), simple.get(), local.x, asyncio.run(ask()), pool.submit(name).result()


class Catalog:
    _made: Any = None
    _guard = threading.Lock()

    def __new__(cls) -> Any:
        with cls._guard:
            cls._made = cls._made or super().__new__(cls)
            return cls._made

    def __init__(self) -> None:
        self.lock = threading.RLock()

    @functools.cached_property
    def size(self) -> int:
        with self.lock:
            return 4


catalog = Catalog()
by_object = weakref.WeakKeyDictionary({catalog: "catalog"})
by_name = weakref.WeakValueDictionary({"catalog": catalog})
known = weakref.WeakSet([catalog])


@case
def objects_have_locks_and_are_found_by_weak_references() -> Any:
    return catalog.size, Catalog() is catalog, by_object[catalog], by_name["catalog"] is catalog, len(known)


logger = logging.getLogger("shop.prices")
adapter = logging.LoggerAdapter(logger, {})
choose = random.choice
out = sys.stdout


@case
def what_python_has_once_is_that_of_the_process() -> Any:
    names = logger is logging.getLogger("shop.prices"), adapter.logger is logger
    here = choose.__self__ is random.choice.__self__, out is sys.stdout, environ is sys.modules["os"].environ
    return names, here, chosen.dumps(1)


# ---- types


class Color(enum.Enum):
    RED = "red"
    CRIMSON = "red"
    BLUE = "blue"

    @property
    def loud(self) -> str:
        return self.value.upper()

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return cls.BLUE


class Planet(enum.Enum):
    EARTH = (1, 2.0)

    def __init__(self, number: int, mass: float) -> None:
        self.mass = mass


class Code(str, enum.Enum):  # noqa: UP042
    OK = "ok", 200

    def __new__(cls, text: str, status: int) -> Any:
        member = str.__new__(cls, text.upper())
        member._value_ = text
        member.status = status
        return member


class Pair(tuple, enum.Enum):
    ONE = (1, 2)


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2
    ALL = 3


class Level(enum.StrEnum):
    LOW = enum.auto()


@case
def enumerations_keep_aliases_and_what_their_constructors_set() -> Any:
    members = [*Color.__members__, *Access.__members__, *(each.name for each in Access)]
    lookups = Color("red") is Color.CRIMSON, Color("?").loud, Code("ok") is Code.OK, Access(3).name
    return members, lookups, Planet.EARTH.mass, str.__str__(Code.OK), Code.OK.status, Pair.ONE[1], Level.LOW


@dataclasses.dataclass
class Point:
    x: int
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int = 3


class Row(NamedTuple):
    id: UserId
    name: str = "x"


class Options(TypedDict, total=False):
    size: int


class Sized(Protocol):
    def size(self) -> int: ...


class Base(abc.ABC):
    @abc.abstractmethod
    def size(self) -> int: ...

    @property
    def double(self) -> int:
        return 2 * self.size()


class Box(Base, Generic[T]):
    class Label:
        text = "box"

    def __init__(self, content: T) -> None:
        self.content = content

    def size(self) -> int:
        return len(self.Label.text)

    @property
    def double(self) -> int:
        return super().double + 1


class IntBox(Box[int]):
    @classmethod
    def made(cls) -> "IntBox":
        return cls(5)


class Plugin:
    def __init_subclass__(cls, /, prefix: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = prefix + cls.kind.upper()


class Json(Plugin, prefix="a "):
    kind = "json"


@case
def classes_of_all_kinds() -> Any:
    class Later(Plugin, prefix="the "):
        kind = "last"

    try:
        Base()
    except TypeError:
        values = [IntBox.made().double, Box[str]("b").content, Json.name, Later.name, Ts.__name__]
        is_required = dataclasses.fields(Point)[0].default is dataclasses.MISSING
        return values, dataclasses.astuple(Point(1)), is_required, Frozen().x, Row(UserId(2)), Options(size=1)


class Settings(BaseModel):
    name: str = "shop"
    color: Color = Color.RED

    @computed_field
    @property
    def title(self) -> str:
        return self.name.title()


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    inner: "Cat | None" = None


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


class Page(BaseModel, Generic[T]):
    items: list[T]


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
pets = pydantic.TypeAdapter(Pet)


@case
def models_of_pydantic() -> Any:
    page = Page[Color](items=["red", "blue"])
    return Settings().title, type(pets.validate_python({"kind": "dog"})).__name__, page.items[0].loud


@functools.lru_cache
def get_settings() -> Settings:
    return Settings()


def get_connection() -> Any:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        yield connection


class Query:
    def __init__(self, level: Level = Level.LOW) -> None:
        self.level = level


app = FastAPI()
app.state.lock = threading.Lock()


@app.get("/info/{color}")
def info(
    color: Color,
    settings: Annotated[Settings, Depends(get_settings)],
    query: Annotated[Query, Depends()],
    place: Annotated[Point | None, Depends(lambda: None)],
    connection: Annotated[Any, Depends(get_connection)],
) -> dict[str, Any]:
    with app.state.lock:
        number = connection.execute("select 1").fetchone()
    return {"color": color.loud, "settings": settings, "level": query.level, "number": number, "place": place}


@app.post("/pets")
def add(pet: Pet, options: Options, row: Row, page: Page[Settings]) -> Page[Settings]:
    return page


@case
def an_application_of_fastapi() -> Any:
    async def ask() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            body = {"pet": {"kind": "cat"}, "options": {"size": 1}, "row": [3], "page": {"items": [{}]}}
            answers = [
                await client.get("/info/red?level=low"),
                await client.get("/info/red?level=high"),
                await client.post("/pets", json=body),
                await client.get("/openapi.json"),
            ]
            return [(each.status_code, each.json()) for each in answers]

    return asyncio.run(ask())


if __name__ == "__main__":
    from daskserve.data.replica.user_code.definitions import inspect_definition
    from daskserve.payload.pickling import dump_bytes

    inspect_definition(app)
    with lock:  # the lock arrives unlocked
        pickled = [dump_bytes(each) for each in CASES]
    results = [(each.__name__, data, repr(each())) for data, each in zip(pickled, CASES, strict=True)]
    with open(sys.argv[1], "wb") as file:
        pickle.dump(results, file)
