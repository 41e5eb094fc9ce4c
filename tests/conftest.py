"""Configuration of all tests: marks by folder, nightly tests, and reproducible property tests."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import AsyncExitStack, _AsyncGeneratorContextManager
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from daskserve.testing import run_virtual

HERE = Path(__file__).parent
#: A test that takes longer hangs.
DEADLINE_S = 120.0

# The same examples in every run, and no deadline: a busy machine is not a failure.
# A failure is shown as found. Shrinking a schedule takes too long for the suite; nightly runs do it.
settings.register_profile(
    "daskserve", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], print_blob=True
)
# Many examples, different in every run: pytest --hypothesis-profile=nightly tests/simulation
settings.register_profile("nightly", deadline=None, max_examples=10_000, print_blob=True)
settings.load_profile("daskserve")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the tests marked nightly, too")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function as a test, with a deadline.

    It runs in virtual time if it has that mark, or on a loop of the fixture ``loop_factory`` if it uses it. A
    fixture that returns an asynchronous context manager is entered on that loop; the test gets its value.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    is_virtual = pyfuncitem.get_closest_marker("virtual_time") is not None

    async def run() -> None:
        values = dict(pyfuncitem.funcargs)
        async with asyncio.timeout(None if is_virtual else DEADLINE_S), AsyncExitStack() as stack:
            for name, value in values.items():
                if isinstance(value, _AsyncGeneratorContextManager):
                    values[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(
                **{name: values[name] for name in inspect.signature(pyfuncitem.obj).parameters}
            )

    if is_virtual:
        run_virtual(run)
    else:
        with asyncio.Runner(loop_factory=pyfuncitem.funcargs.get("loop_factory")) as runner:
            runner.run(run())
    return True


def is_named(item: pytest.Item, arguments: list[str]) -> bool:
    name = getattr(item, "originalname", item.name)
    return any(name in each.partition("::")[2] for each in arguments)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all tests in tests/integration as integration and slow; leave nightly ones out unless asked to."""
    for item in items:
        if (HERE / "integration") in item.path.parents:
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.slow)
    if config.getoption("nightly") or "nightly" in config.getoption("markexpr"):
        return
    # A test that is named on the command line is run.
    named = [item for item in items if is_named(item, config.args)]
    left_out = [item for item in items if item.get_closest_marker("nightly") and item not in named]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
