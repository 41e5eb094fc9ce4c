"""Definitions of every form: their inspection, how they are loaded, and how they answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tables import case

from daskserve.common.types import Message
from daskserve.data.replica.requests.accept_batch import accept_batch
from daskserve.data.replica.user_code.definitions import (
    CALL,
    CallableFacts,
    inspect_definition,
    is_async,
)
from daskserve.data.replica.user_code.lifespan import Lifespan
from daskserve.data.replica.user_code.responses import Unfinished
from daskserve.data.replica.user_code.servable import Servable, load_definition
from daskserve.errors import BadRequestError, ServeError
from daskserve.payload import pickling
from daskserve.payload.importing import import_definition

pytestmark = pytest.mark.smoke


def plain(request: Any) -> str:
    return "plain"


def without_parameters() -> str:
    return "nothing"


def with_any_parameters(*args: Any) -> int:
    return len(args)


async def coroutine(request: Any) -> str:
    return "async"


async def async_generator(request: Any) -> AsyncIterator[str]:
    yield "chunk"


async def asgi_function(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@accept_batch
def batched(requests: list[Any]) -> list[Any]:
    return requests


class Counter:
    """A class with methods of every kind."""

    constant = 3

    class Nested:
        pass

    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.thread = threading.current_thread()

    def __call__(self, request: Any) -> int:
        return self.value

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    async def slow(self) -> str:
        return "slow"

    @property
    def half(self) -> float:
        return self.value / 2

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    def _private(self) -> None: ...


class AsyncCounter:
    async def __init__(self, start: int) -> None:  # type: ignore[misc]
        await asyncio.sleep(0)
        self.value = start

    async def __call__(self) -> int:
        return self.value


class Batcher:
    @accept_batch
    async def __call__(self, requests: list[Any]) -> list[Any]:
        return requests

    def single(self, request: Any) -> Any:
        return request


class Application:
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...

    def method(self) -> str:
        return "called"


class NotCallable:
    def _method(self) -> None: ...


APP = Starlette()

# ---- what is known before anything runs


def test_facts_are_read_from_a_definition() -> None:
    for definition, blocking, asgi, batches, methods in [
        (plain, True, False, False, {CALL}),
        (coroutine, False, False, False, {CALL}),
        (async_generator, False, False, False, {CALL}),
        (functools.partial(coroutine, None), False, False, False, {CALL}),
        (lambda request: None, True, False, False, {CALL}),
        (len, True, False, False, {CALL}),
        (asgi_function, False, True, False, {CALL}),
        (APP, False, True, False, {CALL}),
        (batched, True, False, True, {CALL}),
        (Counter, True, False, False, {CALL, "add", "slow", "static", "name"}),
        (AsyncCounter, False, False, False, {CALL}),
        (Batcher, False, False, True, {CALL, "single"}),
        (Application, False, True, False, {CALL, "method"}),
    ]:
        with case(definition, blocking, asgi, batches, methods):
            facts = inspect_definition(definition)
            assert (facts.is_blocking, facts.is_asgi_app, facts.accepts_batches) == (blocking, asgi, batches)
            assert set(facts.methods) == methods


def test_a_plain_callable_without_argument_ignores_bodies() -> None:
    class Model:
        def __call__(self) -> None: ...

    async def coroutine() -> None: ...

    assert inspect_definition(lambda: None).ignores_bodies
    assert inspect_definition(Model).ignores_bodies
    assert not any(inspect_definition(each).ignores_bodies for each in (lambda request: None, coroutine, APP))


def test_a_class_without_call_is_as_its_public_methods_are() -> None:
    class Async:
        async def a(self) -> None: ...

        def check_health(self) -> None: ...

    class Plain(Async):
        def b(self) -> None: ...

    class Batched(Async):
        many = accept_batch(lambda self, requests: requests)

    class Hooks:
        def check_health(self) -> None: ...

    facts = [inspect_definition(each) for each in (Async, Plain, Batched)]
    assert [each.is_blocking for each in facts] == [False, True, True]
    assert [each.accepts_batches for each in facts] == [False, False, True]
    assert not any(each.is_asgi_app for each in facts)
    assert not inspect_definition(Hooks).is_blocking


def test_each_method_is_known_for_itself() -> None:
    methods = inspect_definition(Counter).methods
    assert methods["slow"].is_async
    assert not methods["add"].is_async
    takes = {name: method.takes_argument for name, method in methods.items()}
    assert takes == {CALL: True, "add": True, "slow": False, "static": False, "name": False}
    batches = inspect_definition(Batcher).methods
    assert batches[CALL].accepts_batches
    assert not batches["single"].accepts_batches


def test_a_callable_takes_the_request_or_nothing() -> None:
    for function, takes in [
        (plain, True),
        (without_parameters, False),
        (with_any_parameters, True),
        (lambda *, k=1: k, False),
    ]:
        with case(function, takes):
            assert inspect_definition(function).methods[CALL].takes_argument is takes


def test_a_marked_class_takes_batches_everywhere() -> None:
    @accept_batch
    class Marked:
        def __call__(self, requests: list[Any]) -> list[Any]:
            return requests

        def other(self, requests: list[Any]) -> list[Any]:
            return requests

    methods = inspect_definition(Marked).methods
    assert all(method.accepts_batches for method in methods.values())


def test_of_an_import_path_nothing_is_known_yet() -> None:
    assert inspect_definition("no.such.thing", (1,), {"k": 2}) == CallableFacts()
    assert CallableFacts().is_blocking


def test_an_unsupported_definition_is_a_type_error() -> None:
    for definition in [3, None, {}, NotCallable()]:
        with case(definition):
            with pytest.raises(TypeError) as caught:
                inspect_definition(definition)
            text = str(caught.value)
            assert text.startswith(
                "Backend definition must be a function, a class, an ASGI application or an import path, got "
            )
            assert type(definition).__name__ in text


def test_a_class_may_have_no_public_method() -> None:
    facts = inspect_definition(NotCallable)
    assert not facts.methods
    assert not facts.is_blocking


def test_only_a_class_takes_init_arguments() -> None:
    for definition in [plain, APP, asgi_function]:
        with case(definition):
            for args, kwargs in (((1,), {}), ((), {"k": 1})):
                with pytest.raises(ValueError, match="Only a class takes init arguments"):
                    inspect_definition(definition, args, kwargs)
            inspect_definition(Counter, (1,), {"start": 2})


def test_an_object_is_async_as_its_call_is() -> None:
    class Callable_:
        async def __call__(self) -> None: ...

    assert is_async(Callable_())
    assert is_async(functools.partial(Callable_()))
    assert not is_async(plain)


# ---- import paths


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "served_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "good.py").write_text(
        "class Outer:\n    class Inner:\n        def __call__(self): ...\nTEXT = 'x'"
    )
    (folder / "needy.py").write_text("import a_module_that_is_missing\n")
    (folder / "broken.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder.name
    for name in [name for name in sys.modules if name.startswith("served_package")]:
        del sys.modules[name]


def test_both_forms_of_import_path(package: str) -> None:
    outer = import_definition(f"{package}.good.Outer")
    assert outer.__name__ == "Outer"
    assert import_definition(f"{package}.good:Outer") is outer
    assert import_definition(f"{package}.good:Outer.Inner") is outer.Inner


def test_an_import_path_of_another_form() -> None:
    for path in ["", "name", "mod:", ":name", "mod:a b", "a..b", "/file.py:x", "mod:a:b"]:
        with case(path):
            with pytest.raises(
                BadRequestError, match=r"must have the form 'pkg\.mod\.Name' or 'pkg\.mod:Name'"
            ):
                import_definition(path)


def test_an_import_path_to_nowhere(package: str) -> None:
    for path, missing in (
        (f"{package}.absent.Name", f"{package}.absent"),
        ("absent_package.mod:Name", "absent_package"),
        (f"{package}.good.Outer.Inner", f"{package}.good.Outer"),
    ):
        with pytest.raises(BadRequestError, match=f"there is no module '{missing}'"):
            import_definition(path)


def test_an_import_path_to_a_missing_name(package: str) -> None:
    for path in (f"{package}.good.Missing", f"{package}.good:Outer.Missing"):
        with pytest.raises(BadRequestError, match=f"{package}.good has no '.*Missing'"):
            import_definition(path)


def test_errors_inside_the_users_module_are_not_masked(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        import_definition(f"{package}.needy.Name")
    with pytest.raises(RuntimeError, match="at import"):
        import_definition(f"{package}.broken.Name")


# ---- loading and constructing


def loaded(definition: Any, *args: Any, **kwargs: Any) -> Servable:
    return load_definition(pickling.dump_bytes((definition, args, kwargs)), display_name="deployment 'b'")


def made(definition: Any, *args: Any, **kwargs: Any) -> Servable:
    servable = loaded(definition, *args, **kwargs)
    servable.construct_in_thread()
    return servable


def test_a_definition_is_checked_again_where_it_is_loaded(package: str) -> None:
    assert loaded(f"{package}.good:Outer.Inner").is_class
    with pytest.raises((TypeError, BadRequestError), match="the text 'x'"):
        loaded(f"{package}.good:TEXT")
    with pytest.raises(ValueError, match="init arguments"):
        loaded("os.path:join", 1)


def test_a_class_is_constructed_with_its_arguments() -> None:
    assert made(Counter, 3).target.value == 3
    assert made(Counter, start=4).target.value == 4
    assert made(plain).target is plain


@pytest.mark.parametrize("slots", [{}, {"__slots__": ()}])
def test_an_async_destructor_is_awaited_once(slots: dict[str, Any]) -> None:
    seen: list[str] = []

    async def forget(self: Any) -> None:
        await asyncio.sleep(0)
        seen.append("deleted")

    kind = type("Mortal", (), {"__call__": lambda self: None, "__del__": forget, **slots})
    servable = Servable(kind, (), {})
    servable.construct_in_thread()
    assert servable.must_be_closed_on_loop
    asyncio.run(servable.close())
    assert seen == ["deleted"]


class Attributes:
    """Its attributes are the items of a dict, with the wrong error for missing ones."""

    def __init__(self) -> None:
        self.__dict__["items"] = {}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["items"][name]

    def __call__(self) -> str:
        return "called"


def test_an_object_whose_attributes_raise_is_released() -> None:
    """Python looks for ``__del__`` in the class, and so does daskserve."""
    servable = Servable(Attributes, (), {})
    servable.construct_in_thread()
    assert not servable.must_be_closed_on_loop
    asyncio.run(servable.close())
    assert servable.target is None


# ---- methods and hooks


def test_callers_may_ask_for_public_methods_only() -> None:
    servable = made(Counter)
    assert servable.method("add").name == "add"
    for name in ("_private", "__init__", "half", "constant", "Nested", "missing"):
        with pytest.raises(
            BadRequestError, match=f"'b' has no public method '{name}'; it has: __call__, add"
        ):
            servable.method(name)


def test_an_asgi_application_takes_no_calls_but_its_other_methods_do() -> None:
    with pytest.raises(BadRequestError, match="is an ASGI application"):
        made(APP).method(CALL)
    assert made(Application).method("method").name == "method"


def test_a_hook_that_is_missing_is_named() -> None:
    with pytest.raises(BadRequestError, match=r"of deployment 'b' has no reconfigure\(\) method"):
        made(Counter).hook("reconfigure")
    with pytest.raises(BadRequestError):
        made(plain).hook("__name__")
    assert made(Counter, 2).hook("add")(1) == 3


# ---- calls


def answer(servable: Servable, head: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a call, run in the thread or on the loop that its method needs."""
    method = servable.method(head.get("method", CALL))
    arguments = pickling.dump((args, kwargs))
    if method.is_async:
        return asyncio.run(servable.answer_call(method, head, arguments)).load()
    result = servable.answer_call_in_thread(method, head, arguments)
    if isinstance(result, Unfinished):
        result = asyncio.run(servable.finish_call(method, result.result))
    return result.load()


def describe(request: Any) -> Any:
    return request.data, dict(request.query_params), request.headers.get("h"), request.method


async def describe_async(request: Any) -> Any:
    return await request.body(), dict(request.query_params), request.headers["h"], request.method


def test_a_classic_call_hands_over_one_request() -> None:
    for function in [describe, describe_async]:
        with case(function):
            head = {"legacy": True, "http_method": "PUT", "http_headers": {"h": "v"}}
            assert answer(made(function), head, "data", k=2) == ("data", {"k": 2}, "v", "PUT")


def test_a_classic_call_of_a_callable_without_parameters_passes_none() -> None:
    assert answer(made(without_parameters), {"legacy": True}, "data") == "nothing"
    assert answer(made(Counter), {"legacy": True, "method": "static"}) == "static"


# ---- lifespan


def lifespan_app(events: list[str], fail: bool = False) -> Callable[..., Any]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "lifespan"
        while True:
            message = await receive()
            events.append(message["type"])
            outcome = "failed" if fail else "complete"
            if message["type"] == "lifespan.startup":
                scope["state"]["model"] = "loaded"
            await send({"type": f"{message['type']}.{outcome}", "message": "no model"})
            if fail or message["type"] == "lifespan.shutdown":
                return

    return app


def test_a_failed_start_up_is_an_error_with_the_applications_reason() -> None:
    with pytest.raises(ServeError, match="no model"):
        asyncio.run(Lifespan().open(lifespan_app([], fail=True)))


def test_an_application_without_lifespan_is_served_without() -> None:
    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"

    async def returns(scope: Any, receive: Any, send: Any) -> None: ...

    async def main() -> None:
        for app in (refuses, returns):
            lifespan = Lifespan()
            await lifespan.open(app)
            assert not lifespan.is_open
            await lifespan.close()

    asyncio.run(main())


def test_an_error_after_the_start_up_message_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        raise LookupError("no database")

    async def main() -> None:
        lifespan = Lifespan()
        await lifespan.open(app)
        assert not lifespan.is_open

    asyncio.run(main())
    assert "LookupError: no database" in caplog.text


async def test_a_shutdown_is_complete_even_if_the_start_up_was_cancelled() -> None:
    is_ready = asyncio.Event()
    noted: list[str] = []

    @contextlib.asynccontextmanager
    async def slow(app: Any) -> AsyncIterator[None]:
        await is_ready.wait()
        yield
        await asyncio.sleep(0)
        noted.append("shut down")

    lifespan = Lifespan()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(lifespan.open(Starlette(lifespan=slow)), 0.01)
    is_ready.set()
    await lifespan.close()
    assert noted == ["shut down"]


async def test_a_shutdown_that_is_cancelled_ends_the_application() -> None:
    @contextlib.asynccontextmanager
    async def hanging(app: Any) -> AsyncIterator[None]:
        yield
        await asyncio.Event().wait()

    lifespan = Lifespan()
    await lifespan.open(Starlette(lifespan=hanging))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(lifespan.close(), 0.01)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not lifespan.is_open


@pytest.mark.parametrize("part", ["startup", "shutdown"])
def test_a_lifespan_function_that_raises_is_reported_once(
    part: str, caplog: pytest.LogCaptureFixture
) -> None:
    @contextlib.asynccontextmanager
    async def failing(app: Any) -> AsyncIterator[None]:
        if part == "startup":
            raise LookupError("no database")
        yield
        raise LookupError("no database")

    async def main() -> None:
        lifespan = Lifespan()
        await lifespan.open(Starlette(lifespan=failing))
        await lifespan.close()

    if part == "startup":
        with pytest.raises(ServeError, match="LookupError: no database"):
            asyncio.run(main())
        assert caplog.text == ""
    else:
        asyncio.run(main())
        assert caplog.text.count("LookupError: no database") == 1


def test_starlettes_own_lifespan_state_reaches_its_requests() -> None:
    async def main() -> list[Message]:
        servable = Servable(STATEFUL, (), {})
        servable.construct_in_thread()
        await servable.open()
        sent: list[Message] = []

        class Exchange:
            is_started = False

            async def receive(self) -> Message:
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(self, message: Message) -> None:
                self.is_started = True
                sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
        await servable.answer_app(scope, Exchange())  # type: ignore[arg-type]
        await servable.close()
        return sent

    assert [each["body"] for each in asyncio.run(main())] == [b"from lifespan"]


async def show_state(request: Request) -> PlainTextResponse:
    return PlainTextResponse(request.state.word)


class _State:
    def __init__(self, app: Any) -> None: ...

    async def __aenter__(self) -> dict[str, str]:
        return {"word": "from lifespan"}

    async def __aexit__(self, *error: Any) -> None: ...


STATEFUL = Starlette(routes=[Route("/", show_state)], lifespan=_State)


def test_the_state_of_an_application_travels_with_it() -> None:
    app = Starlette()
    app.state.words = ["a"]
    app.state.self = app.state
    copy = pickle.loads(cloudpickle.dumps(app)).state
    assert copy.words == ["a"]
    assert copy.self is copy
    copy.words = ["b"]
    assert app.state.words == ["a"]
    assert not hasattr(copy, "other")


def test_the_state_of_an_application_is_pickled_by_a_program_that_only_deploys() -> None:
    """A client inspects definitions, and never imports the modules that run them."""
    program = (
        "import sys, pickle, cloudpickle, daskserve\n"
        "from starlette.applications import Starlette\n"
        "import daskserve.client.client\n"
        "assert 'daskserve.data.replica.user_code.servable' not in sys.modules\n"
        "pickle.loads(cloudpickle.dumps(Starlette()))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
