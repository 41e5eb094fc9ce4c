"""Classes with the routes of an application: which object each endpoint is bound to.

Annotations are not postponed here: they name methods of the class they are in.
"""

import asyncio
import functools
import gc
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, WebSocket
from fastapi.openapi.utils import get_openapi
from httpx import ASGITransport, AsyncClient, Response
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Host, Match, Mount, Route, Router
from tables import case

import daskserve as serve
from daskserve.client.definitions.specs import make_spec
from daskserve.data.replica.user_code.class_app import has_app, ingress
from daskserve.data.replica.user_code.definitions import APP, inspect_definition
from daskserve.data.replica.user_code.servable import Servable
from daskserve.errors import ReplicaStartError, UnpicklableError
from daskserve.payload.parcels import unpack_code
from daskserve.payload.pickling import dump_bytes, load_bytes

pytestmark = pytest.mark.smoke


def get(app: Any, path: str, method: str = "GET", **how: Any) -> Response:
    async def ask() -> Response:
        async with AsyncClient(transport=ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, **how)

    return asyncio.run(ask())


def paths(app: Any, url: str = "/openapi.json") -> list[str]:
    return sorted(get(app, url).json()["paths"])


class Price(BaseModel):
    price: int


def doubled(price: int) -> int:
    return 2 * price


class Page:
    def __init__(self, limit: int = 10) -> None:
        self.limit = limit


# ---- methods as endpoints


def test_methods_are_endpoints_of_each_object_of_their_class() -> None:
    app = FastAPI()

    @ingress(app)
    class Shop:
        def __init__(self, price: int) -> None:
            self.price = price

        @app.get("/plain/{number}", response_model=Price)
        def plain(self, number: int) -> Any:
            return {"price": number * self.price, "secret": 1}

        @app.post("/async")
        async def coroutine(self, body: Price) -> int:
            return body.price + self.price

        @app.get("/failure")
        def failure(self) -> None:
            raise HTTPException(418, f"{self.price}")

    cheap, dear = Shop(1), Shop(100)
    for made, price in ((cheap, 1), (dear, 100), (cheap, 1)):
        assert get(made, "/plain/3").json() == {"price": 3 * price}
        assert get(made, "/plain/x").status_code == 422
        assert get(made, "/async", "POST", json={"price": 5}).json() == 5 + price
        assert get(made, "/failure").json() == {"detail": str(price)}
    assert cheap.plain(2) == {"price": 2, "secret": 1}
    operation = get(cheap, "/openapi.json").json()["paths"]["/plain/{number}"]["get"]
    assert [each["name"] for each in operation["parameters"]] == ["number"]


def test_dependencies_may_be_functions_classes_and_methods() -> None:
    app = FastAPI()
    closed = []

    async def session(request: Request) -> AsyncIterator[str]:
        yield request.url.path
        closed.append(request.url.path)

    @ingress(app)
    class Shop:
        price = 7

        def discount(self, percent: int = 0) -> int:
            return self.price * percent

        def refuse(self) -> None:
            raise HTTPException(403)

        @app.get("/sum")
        def total(
            self,
            page: Annotated[Page, Depends()],
            two: int = Depends(doubled),
            own: int = Depends(discount),
            path: str = Depends(session),
        ) -> list[Any]:
            return [page.limit, two, own, path]

        @app.get("/annotated")
        def annotated(self, own: Annotated[int, Depends(discount)]) -> int:
            return own

        @app.get("/refused", dependencies=[Depends(refuse)])
        def refused(self) -> None: ...

    answer = get(Shop(), "/sum?price=4&percent=3&limit=5")
    assert answer.json() == [5, 8, 21, "/sum"]
    assert closed == ["/sum"]
    assert get(Shop(), "/annotated?percent=2").json() == 14
    assert get(Shop(), "/refused").status_code == 403


def test_routers_mounted_applications_and_websockets_are_bound() -> None:
    app, router, inner, sub = FastAPI(), APIRouter(), APIRouter(), FastAPI()

    @ingress(app)
    class Shop:
        def __init__(self, name: str) -> None:
            self.name = name

        @router.get("/router")
        def of_router(self) -> str:
            return self.name

        @inner.get("/inner")
        async def of_inner(self) -> str:
            return self.name

        @sub.get("/sub")
        def of_sub(self) -> str:
            return self.name

        @router.websocket("/socket")
        async def socket(self, websocket: WebSocket) -> None:
            await websocket.accept()
            await websocket.send_text(self.name)

        router.include_router(inner, prefix="/deeper")
        app.include_router(router, prefix="/api", tags=["api"])
        app.mount("/mounted", sub)

    for name in ("a", "b"):
        shop = Shop(name)
        assert get(shop, "/api/router").json() == name
        assert get(shop, "/api/deeper/inner").json() == name
        assert get(shop, "/mounted/sub").json() == name
        assert paths(shop) == ["/api/deeper/inner", "/api/router"]
        assert paths(shop, "/mounted/openapi.json") == ["/sub"]
        assert texts_of_websocket(shop, "/api/socket") == [name]


def texts_of_websocket(app: Any, path: str) -> list[str]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    asyncio.run(app(scope, receive, send))
    return [each["text"] for each in sent if "text" in each]


def test_methods_of_one_name_and_static_and_class_methods() -> None:
    app = FastAPI()

    @ingress(app)
    class Shop:
        label = "shop"

        @app.get("/")
        def method(self) -> str:
            return "got"

        @app.post("/")
        def method(self) -> str:  # noqa: F811
            return "posted"

        @staticmethod
        @app.get("/static")
        def static(number: int) -> int:
            return number

        @app.get("/outer-static")
        @staticmethod
        def outer(number: int) -> int:
            return number

        @classmethod
        @app.get("/class")
        def of_class(cls) -> str:
            return cls.label

    shop = Shop()
    assert [get(shop, "/").json(), get(shop, "/", "POST").json()] == ["got", "posted"]
    assert get(shop, "/static?number=3").json() == get(shop, "/outer-static?number=3").json() == 3
    assert get(shop, "/class").json() == "shop"


def test_a_derived_class_serves_and_overrides_the_endpoints_of_its_bases() -> None:
    app = FastAPI()

    class Base:
        @app.get("/name")
        def name(self) -> str:
            return type(self).__name__

        @app.get("/size")
        def size(self) -> int:
            return 1

    @ingress(app)
    class First(Base):
        def size(self, factor: int = 2) -> int:
            return super().size() * factor

    @ingress(app)
    class Second(First):
        @app.get("/second")
        def second(self) -> str:
            return "second"

    class Third(Second):
        def second(self) -> str:
            return "third"

    assert get(First(), "/name").json() == "First"
    assert get(First(), "/size?factor=5").json() == 5
    assert get(First(), "/second").status_code == 404
    assert get(Second(), "/second").json() == "second"
    assert get(Third(), "/second").json() == "third"
    assert get(Third(), "/name").json() == "Third"


def test_starlette_routes_bind_methods_through_middlewares() -> None:
    class Mark:
        def __init__(self, app: Any, mark: bytes) -> None:
            self.app = app
            self.mark = mark

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def marked(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-mark", self.mark)]
                await send(message)

            await self.app(scope, receive, marked)

    class Own(BaseRoute):
        """A user's own kind of route, which has no endpoint."""

        def matches(self, scope: Any) -> tuple[Match, Any]:
            return Match.FULL if scope["path"] == "/own" else Match.NONE, {}

        async def handle(self, scope: Any, receive: Any, send: Any) -> None:
            await PlainTextResponse("own")(scope, receive, send)

    app = Starlette(middleware=[Middleware(Mark, mark=b"app")], routes=[Own()])

    @ingress(app)
    class Shop:
        name = "shop"

        def home(self, request: Request) -> Any:
            return PlainTextResponse(self.name)

        async def later(self, request: Request) -> Any:
            return PlainTextResponse(self.name + request.url.path)

        app.add_route("/", home)
        app.router.routes += [
            Route("/marked", later, middleware=[Middleware(Mark, mark=b"route")]),
            Mount("/m", routes=[Route("/x", later)], middleware=[Middleware(Mark, mark=b"mount")]),
            Mount("/r", Router([Route("/x", later)], middleware=[Middleware(Mark, mark=b"router")])),
            Host("other", Router([Route("/host", later)])),
        ]

    expected = {
        "/": ("shop", "app"),
        "/own": ("own", "app"),
        "/marked": ("shop/marked", "route, app"),
        "/m/x": ("shop/m/x", "mount, app"),
        "/r/x": ("shop/r/x", "router, app"),
    }
    for path, (text, marks) in expected.items():
        answer = get(Shop(), path)
        assert (answer.text, answer.headers["x-mark"]) == (text, marks)
    assert get(Shop(), "/host", headers={"host": "other"}).text == "shop/host"


def test_arrays_and_frames_are_json() -> None:
    app = FastAPI()

    @ingress(app)
    class Shop:
        @app.get("/")
        def root(self):  # type: ignore[no-untyped-def]
            return {"array": np.zeros(2), "number": np.float32(0.5)}

    assert get(Shop(), "/").json() == {"array": [0, 0], "number": 0.5}


# ---- what classes share


def test_classes_of_one_application_have_only_their_own_routes() -> None:
    app, router, sub = FastAPI(), APIRouter(), FastAPI()
    app.include_router(router)
    app.mount("/sub", sub)

    @app.get("/common")
    def common() -> str:
        return "common"

    def make(name: str) -> Any:
        @ingress(app)
        class Shop:  # both have the same name
            @app.get("/")
            def root(self) -> str:
                return name

            @sub.get("/")
            def of_sub(self) -> str:
                return name

        return Shop

    first = make("first")
    second = make("second")

    @app.get("/later")
    def later() -> str:
        return "later"

    for made, name in ((first(), "first"), (second(), "second")):
        assert get(made, "/").json() == get(made, "/sub/").json() == name
        assert get(made, "/common").json() == "common"
        assert get(made, "/later").json() == "later"
        assert paths(made) == ["/", "/common", "/later"]


def test_classes_of_one_application_do_not_have_each_others_methods_of_one_name() -> None:
    app = FastAPI(openapi_url=None)  # the first route is that of a method

    @ingress(app)
    class First:
        @app.get("/first")
        def method(self) -> str:
            return "got"

        @app.post("/first")
        def method(self) -> str:  # noqa: F811
            return "posted"

    @ingress(app)
    class Second:
        @app.get("/second")
        def method(self) -> str:
            return "second"

    first, second = First(), Second()
    assert [get(first, "/first", method).json() for method in ("GET", "POST")] == ["got", "posted"]
    assert [get(second, "/first", method).status_code for method in ("GET", "POST")] == [404, 404]
    assert get(second, "/second").json() == "second"


def test_the_application_itself_is_not_changed() -> None:
    app, sub = FastAPI(), FastAPI()
    app.mount("/sub", sub)
    app.state.number = 1

    class Shop:
        @app.get("/")
        @sub.get("/")
        def root(self) -> int:
            return app.state.number

    apps = [app, app.router, sub, sub.router, *app.routes, *sub.routes]
    before = [dict(vars(each)) for each in apps]
    routes = [list(app.routes), list(sub.routes)]
    shop = ingress(app)(Shop)()
    app.state.number = 2  # the state is shared
    assert get(shop, "/").json() == get(shop, "/sub/").json() == 2
    assert [dict(vars(each)) for each in apps] == before
    assert [list(app.routes), list(sub.routes)] == routes


def test_middlewares_handlers_and_documentation_belong_to_the_object() -> None:
    app = FastAPI(docs_url="/my-docs")

    @app.middleware("http")
    async def mark(request: Request, call_next: Callable[..., Any]) -> Any:
        answer = await call_next(request)
        answer.headers["x-title"] = request.app.title
        return answer

    @app.exception_handler(ValueError)
    def handle(request: Request, error: ValueError) -> Any:
        return PlainTextResponse(str(error), 409)

    @ingress(app)
    class Shop:
        @app.get("/")
        def root(self, request: Request) -> str:
            raise ValueError(str(request.url_for("root")))

    answer = get(Shop(), "/")
    assert (answer.status_code, answer.text) == (409, "http://test/")
    assert answer.headers["x-title"] == app.title
    assert get(Shop(), "/my-docs").status_code == 200


def test_a_schema_that_the_user_extends_describes_bound_methods() -> None:
    app = FastAPI()

    def extended() -> Any:
        if not app.openapi_schema:
            app.openapi_schema = get_openapi(title="Extended", version="1", routes=app.routes)
        return app.openapi_schema

    app.openapi = extended  # type: ignore[method-assign]

    def make(path: str) -> Any:
        @ingress(app)
        class Shop:
            @app.get(path)
            def root(self) -> None: ...

        return Shop()

    first, second = make("/first"), make("/second")
    for _ in range(2):
        for made, path in ((first, "/first"), (second, "/second")):
            schema = get(made, "/openapi.json").json()
            assert (schema["info"]["title"], list(schema["paths"])) == ("Extended", [path])
            assert "parameters" not in schema["paths"][path]["get"]
    assert app.openapi_schema is None


def test_overridden_dependencies_apply_to_methods() -> None:
    app = FastAPI()
    app.dependency_overrides[doubled] = lambda: 99

    @ingress(app)
    class Shop:
        @app.get("/")
        def root(self, two: int = Depends(doubled)) -> int:
            return two

        @app.websocket("/socket")
        async def socket(self, websocket: WebSocket, two: int = Depends(doubled)) -> None:
            await websocket.accept()
            await websocket.send_text(str(two))

    assert get(Shop(), "/").json() == 99
    assert texts_of_websocket(Shop(), "/socket") == ["99"]


def test_a_pickled_class_keeps_its_routes() -> None:
    app = FastAPI()

    @ingress(app)
    class Shop:
        def __init__(self, name: str) -> None:
            self.name = name

        @app.get("/")
        def root(self) -> str:
            return self.name

        @staticmethod
        @app.get("/static")
        def static() -> str:
            return "static"

    data = dump_bytes(Shop)
    first = load_bytes(data)("first")
    second = load_bytes(data)("second")  # gives the class of this process new functions
    for made, name in ((first, "first"), (second, "second")):
        assert get(made, "/").json() == name
        assert get(made, "/static").json() == "static"


# ---- what is added later


def shop_that_adds() -> type[Any]:
    """Return a class whose constructor adds to its application in every way."""
    app, sub, router, included, late = FastAPI(), FastAPI(), APIRouter(), APIRouter(), APIRouter()
    app.include_router(included, prefix="/included")
    app.mount("/sub", sub)

    class Mark:
        def __init__(self, app: Any, mark: str) -> None:
            self.app, self.mark = app, mark

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def marked(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-mark", self.mark.encode())]
                await send(message)

            await self.app(scope, receive, marked)

    @ingress(app)
    class Shop:
        def __init__(self, name: str) -> None:
            self.name = name
            app.add_api_route("/method", Shop.method)
            app.add_api_route("/own-method", self.method)
            app.router.routes.insert(0, Route("/starlette", lambda _: PlainTextResponse(self.name)))
            app.router.routes += [Route("/plus", lambda _: PlainTextResponse(self.name))]
            router.add_api_route("/before", self.method)
            app.include_router(router, prefix="/router")
            router.add_api_route("/after", self.method)
            included.add_api_route("/more", self.method)
            sub.add_api_route("/more", self.method)
            admin, own = FastAPI(), APIRouter()
            app.mount("/admin", admin)
            admin.add_api_route("/", self.method)
            app.include_router(own, prefix="/own")
            own.add_api_route("/route", self.method)
            app.add_middleware(Mark, mark=name)
            app.add_exception_handler(ValueError, lambda *_: PlainTextResponse(self.name, 409))

            @app.websocket("/socket")
            async def socket(websocket: WebSocket) -> None:
                await websocket.accept()
                await websocket.send_text(self.name)

        def method(self) -> str:
            return self.name

        @router.get("/of-class")
        def of_router(self) -> str:
            return self.name

        @included.get("/of-class")
        def of_included(self) -> str:
            return self.name

        @late.get("/of-class")
        def of_late(self, name: str = Depends(method)) -> str:
            return name

        @app.get("/failure")
        def failure(self) -> str:
            raise ValueError

    app.include_router(late, prefix="/late")
    return Shop


def follows_included_routers() -> bool:
    """Return whether FastAPI serves routes that are added to a router after it was included: since 0.136."""
    app, router = FastAPI(), APIRouter()
    app.include_router(router)
    router.add_api_route("/", lambda: None)
    return get(app, "/").status_code == 200


ADDED = ["/late/of-class", "/method", "/own-method", "/router/before", "/router/of-class"]
if follows_included_routers():
    ADDED += ["/included/more", "/included/of-class", "/own/route", "/router/after"]
#: The routes that FastAPI does not describe.
OTHERS = ["/admin/", "/plus", "/starlette", "/sub/more"]


@pytest.mark.parametrize("loads", ["once", "twice", "twice, not complete"])
def test_routes_that_a_constructor_adds_belong_to_its_replica(loads: str) -> None:
    cls = shop_that_adds()
    data = dump_bytes(cls)
    servables = [Servable(cls if loads == "once" else load_bytes(data), ("a",), {})]
    first = vars(cls)[APP]
    servables.append(Servable(cls if loads == "once" else load_bytes(data), ("b",), {}))
    if loads == "twice, not complete":
        setattr(cls, APP, first)  # another thread is replacing the attributes of the class one by one
    for each in servables:
        each.construct_in_thread()
    for each, name in zip(servables, ("a", "b"), strict=True):
        for path in ADDED + OTHERS:
            answer = get(each.target, path)
            assert (path, answer.status_code, answer.text.strip('"')) == (path, 200, name)
            assert answer.headers["x-mark"] == name
        answer = get(each.target, "/failure")
        assert (answer.status_code, answer.text) == (409, name)
        assert texts_of_websocket(each.target, "/socket") == [name]
        assert paths(each.target) == sorted([*ADDED, "/failure"])


def test_an_object_that_a_program_makes_serves_what_its_constructor_adds() -> None:
    made = shop_that_adds()("a")
    assert [get(made, each).text.strip('"') for each in ADDED + OTHERS] == ["a"] * len(ADDED + OTHERS)


def test_nothing_refers_to_the_object_of_a_replica_that_has_ended() -> None:
    servable = Servable(shop_that_adds(), ("a",), {})
    servable.construct_in_thread()
    # This is not a plain endpoint, because the thread that has run one refers to it until it runs another.
    assert texts_of_websocket(servable.target, "/socket") == ["a"]
    ended = weakref.ref(servable.target)
    servable.close_in_thread()
    gc.collect()
    assert ended() is None


def test_routes_of_other_classes_are_not_pickled() -> None:
    app, late = FastAPI(), APIRouter()
    connection = (each for each in "")  # cannot be pickled

    @ingress(app)
    class First:
        @app.get("/first")
        def root(self) -> str:
            return "first"

    @ingress(app)
    class Second:
        @app.get("/second")
        @late.get("/second")
        def root(self) -> Any:
            return connection

    app.include_router(late, prefix="/late")
    get(Second(), "/openapi.json")

    def packed(cls: Any) -> bytes:
        return make_spec("tag", cls, (), {}, actor_options=None, config=None, timeout_s=None).code

    made, _, _ = unpack_code(packed(First), ())
    assert paths(made()) == ["/first"]
    with pytest.raises(UnpicklableError, match=r"Second\.root -> variable 'connection'"):
        packed(Second)


# ---- routers


def test_a_router_of_fastapi_is_an_ingress() -> None:
    router, inner = APIRouter(prefix="/api", tags=["prices"]), APIRouter()

    @ingress(router)
    class Shop:
        price = 5

        def __init__(self) -> None:
            router.add_api_route("/added", lambda: "added")

        def doubled(self) -> int:
            return 2 * self.price

        @router.get("/price")
        def root(self, two: int = Depends(doubled)) -> int:
            return two

        @inner.get("/refused")
        def refused(self) -> None:
            raise HTTPException(418)

    router.include_router(inner)
    made = load_bytes(dump_bytes(Shop))()
    assert [get(made, path).json() for path in ("/api/price", "/api/added")] == [10, "added"]
    assert [get(made, path).status_code for path in ("/api/refused", "/nothing", "/docs")] == [418, 404, 200]
    assert paths(made) == ["/api/added", "/api/price", "/api/refused"]


@pytest.mark.parametrize("kind", [lambda route: Router([route]), lambda route: route])
def test_a_router_and_a_route_of_starlette_are_an_ingress(kind: Callable[[Route], Any]) -> None:
    def price(self: Any, request: Request) -> Any:
        if "fail" in request.query_params:
            raise HTTPException(418)
        return PlainTextResponse(self.name)

    @ingress(kind(Route("/price", price)))
    class Shop:
        name = "shop"
        method = price

    assert get(Shop(), "/price").text == "shop"
    assert [get(Shop(), path).status_code for path in ("/price?fail=1", "/nothing")] == [418, 404]


# ---- builders and other applications


def build() -> Any:
    app = FastAPI()
    app.state.unpicklable = sys.modules

    @app.get("/")
    def root() -> int:
        return id(app)

    return app


def test_a_builder_is_called_once_for_each_object() -> None:
    decorated = ingress(build)()
    assert dump_bytes(decorated)
    first, second = decorated(), decorated()
    assert get(first, "/").json() == get(first, "/").json() != get(second, "/").json()


def test_a_builder_may_be_a_class_or_a_partial_function() -> None:
    class Built(FastAPI):
        pass

    for builder in (Built, functools.partial(FastAPI, title="x"), lambda: Starlette()):
        assert get(ingress(builder)()(), "/").status_code == 404


def test_a_class_without_methods_serves_any_asgi_application() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("asgi")(scope, receive, send)

    made = ingress(app)()(1, key=2)
    assert type(made).__name__ == "ASGIIngressDeployment"
    assert get(made, "/").text == "asgi"
    assert (made.args, made.kwargs) == ((1,), {"key": 2})


def test_an_ingress_application_may_be_mounted_in_another() -> None:
    outer, inner = FastAPI(), FastAPI()
    inner.add_api_route("/inner", lambda: "inner")
    outer.add_api_route("/outer", lambda: "outer")
    classes = [ingress(outer)(), ingress(inner)()]
    outer.mount("/mounted", inner)
    for made in (each() for each in classes):
        answers = [get(made, each).status_code for each in ("/outer", "/mounted/inner", "/inner")]
        assert answers == ([200, 200, 404] if isinstance(made, classes[0]) else [404, 404, 200])


def test_the_builder_of_a_servable_runs_after_the_constructor_and_its_errors_are_raised() -> None:
    events: list[str] = []

    def fail() -> Any:
        events.append("builder")
        raise LookupError("no model")

    @ingress(fail)
    class Shop:
        def __init__(self) -> None:
            events.append("constructor")

    servable = Servable(Shop, (), {})
    assert servable.facts.is_asgi_app
    with pytest.raises(LookupError, match="no model"):
        servable.construct_in_thread()
    assert events == ["constructor", "builder"]


def test_a_builder_that_returns_no_application_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"'dict' of @serve.ingress returned \{\}, not an ASGI application"):
        get(ingress(dict)()(), "/")


# ---- wrong uses


def with_call() -> type[Any]:
    class Callable_:
        def __call__(self) -> None: ...

    return Callable_


def with_slots() -> type[Any]:
    class Slotted:
        __slots__ = ()

    return Slotted


def test_wrong_uses_say_what_to_do() -> None:
    for use, error, text in [
        (lambda: ingress(FastAPI())(with_call()), ValueError, "Callable_ has a __call__ method"),
        (lambda: ingress(FastAPI())(with_slots()), ValueError, "Slotted has __slots__"),
        (lambda: ingress(FastAPI())(build), TypeError, "decorates classes, got <function build"),
        (lambda: ingress(7), TypeError, "takes an ASGI application, or a function .* got 7"),
        (lambda: ingress(get), TypeError, "'get' .* must take no arguments.* it takes app, path"),
    ]:
        with case(use, error, text):
            with pytest.raises(error, match=text):
                use()


def test_the_wrong_order_of_decorators_is_named() -> None:
    with pytest.raises(TypeError, match=r"write @serve\.ingress below @serve\.deployment"):
        serve.ingress(FastAPI())(serve.deployment(with_call()))


def test_only_decorated_classes_have_an_application() -> None:
    decorated = ingress(FastAPI())()
    assert has_app(decorated)
    assert not has_app(FastAPI)
    assert not has_app(decorated())


# ---- in an instance


@pytest.fixture(scope="module")
def instance() -> Iterator[Any]:
    from daskserve.testing import local_instance

    with local_instance(http_options={"port": 0}) as client:
        yield client


def test_the_life_of_a_replica_with_an_application(instance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    module = ModuleType("class_app_events")  # is not pickled
    module.note = events.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "class_app_events", module)

    def note(event: str) -> None:
        import_module("class_app_events").note(event)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[dict[str, Any]]:
        note("startup")
        yield {"greeting": "hello"}
        note("shutdown")

    app = FastAPI(lifespan=lifespan)

    @ingress(app)
    class Shop:
        def __init__(self, name: str) -> None:
            note("constructor")
            self.name = name

        def reconfigure(self, config: str) -> None:
            self.config = config

        def check_health(self) -> None:
            if self.config == "bad":
                raise RuntimeError("unhealthy")

        @app.get("/{number}")
        def root(self, number: int, request: Request) -> list[Any]:
            return [number, self.name, self.config, request.state.greeting]

        def __del__(self) -> None:
            note("destructor")

    instance.deploy("shop", Shop, "ann", config={"user_config": "one"}, route_prefix="/shop")
    url = instance.http_urls()[0] + "/shop"
    assert get_url(f"{url}/3") == [3, "ann", "one", "hello"]
    schema = get_url(f"{url}/openapi.json")
    assert (list(schema["paths"]), schema["servers"]) == (["/{number}"], [{"url": "/shop"}])
    handle = instance.get_handle("shop")
    with pytest.raises(Exception, match="is an ASGI application"):
        handle.remote().result(10)
    instance.update_backend_config("shop", {"user_config": "two"})
    assert get_url(f"{url}/3") == [3, "ann", "two", "hello"]
    instance.delete_deployment("shop")
    assert events == ["constructor", "startup", "shutdown", "destructor"]


def test_methods_that_are_endpoints_are_called_by_handle_too(instance: Any) -> None:
    app = FastAPI()

    @ingress(app)
    class Shop:
        @app.get("/{number}")
        async def double(self, number: int) -> int:
            return 2 * number

        def triple(self, number: int) -> int:
            return 3 * number

    instance.deploy("doubler", Shop, config={"num_replicas": 2})
    handle = instance.get_handle("doubler")
    assert [handle.double.remote(4).result(10), handle.triple.remote(4).result(10)] == [8, 12]
    assert get_url(f"{instance.http_urls()[0]}/doubler/4") == 8


MODULE = """
import threading
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
import daskserve as serve

@asynccontextmanager
async def lifespan(given):
    app.add_api_route("/lifespan", lambda: "global")
    given.add_api_route("/given", lambda: "given")
    yield

both = threading.Barrier(2, timeout=10)
app = FastAPI(lifespan=lifespan)
router = APIRouter()
plain = APIRouter(prefix="/plain")

@plain.get("/")
def root():
    return "plain"

@serve.ingress(app)
class Shop:
    def __init__(self):
        self.tag = serve.get_replica_context().replica_tag
        app.router.on_startup.append(self.start)
        router.add_api_route("/tag", self.own_tag)
        router.add_api_route("/both", self.both)
        app.include_router(router)

    def start(self):
        app.add_api_route("/startup", lambda: "startup")

    def reconfigure(self, config):
        app.add_api_route(f"/{config}", self.own_tag)

    def own_tag(self):
        return self.tag

    def both(self):
        return [both.wait(), self.tag, serve.get_replica_context().replica_tag]

    def add(self, path):
        app.add_api_route(path, self.own_tag)

def built():
    return plain
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "class_app_shop.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("class_app_shop")
    sys.modules.pop("class_app_shop", None)


def test_replicas_add_routes_in_each_of_their_hooks(instance: Any, module: Any) -> None:
    config = {"num_replicas": 2, "user_config": "one", "max_concurrent_queries": 1}
    instance.deploy("adds", module.Shop, config=config)
    url = f"{instance.http_urls()[0]}/adds"
    assert [get_url(f"{url}/{each}") for each in ("lifespan", "given")] == ["global", "given"]
    with ThreadPoolExecutor() as pool:
        _, tags, actual = zip(*pool.map(get_url, [f"{url}/both"] * 2), strict=True)
    assert tags == actual
    assert len(set(tags)) == 2
    assert get_url(f"{url}/one") == get_url(f"{url}/tag") in tags
    instance.update_backend_config("adds", {"user_config": "two", "num_replicas": 1})
    assert get_url(f"{url}/two") == get_url(f"{url}/one") in tags
    instance.get_handle("adds").add.remote("/by-handle").result(10)
    assert get_url(f"{url}/by-handle") == get_url(f"{url}/two")
    assert {"/one", "/two", "/by-handle", "/tag"} < get_url(f"{url}/openapi.json")["paths"].keys()
    assert [each.path for each in module.router.routes] == []


def test_a_middleware_that_comes_too_late_fails_the_start(instance: Any) -> None:
    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        app.add_middleware(lambda app: app)
        yield

    app = FastAPI(lifespan=lifespan)
    with pytest.raises(ReplicaStartError, match="Cannot add middleware after an application has started"):
        instance.deploy("late", ingress(app)(), config={"max_constructor_retry_count": 1})


def test_a_router_is_served_wherever_an_application_is(instance: Any, module: Any) -> None:
    instance.run(module.plain, name="object", route_prefix="/object")
    instance.run("class_app_shop:plain", name="path", route_prefix="/path")
    instance.deploy("deployed", module.plain)
    instance.deploy("named", "class_app_shop:plain")
    instance.run(serve.deployment(ingress(module.built)()).bind(), name="built", route_prefix="/built")
    for name in ("object", "path", "deployed", "named", "built"):
        url = f"{instance.http_urls()[0]}/{name}"
        assert get_url(f"{url}/plain/") == "plain"
        assert list(get_url(f"{url}/openapi.json")["paths"]) == ["/plain/"]


def get_url(url: str) -> Any:
    import httpx

    answer = httpx.get(url)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_where_an_application_describes_itself() -> None:
    class Api(FastAPI):
        pass

    class Answer:
        pass

    paths = [
        inspect_definition(each).docs_path
        for each in (ingress(Api(docs_url="/my-docs"))(Answer), FastAPI(), FastAPI(docs_url=None))
    ]
    assert paths == ["/my-docs", "/docs", ""]
