"""Configuration of all tests: marks by folder, and reproducible property tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import Phase, settings

HERE = Path(__file__).parent

# The same examples in every run, and no deadline: a busy machine is not a failure.
# A failure is shown as found: to shrink a schedule takes longer than the suite may; nightly does it.
settings.register_profile(
    "daskserve", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], print_blob=True
)
# Many examples, different in every run: pytest --hypothesis-profile=nightly tests/simulation
settings.register_profile("nightly", deadline=None, max_examples=10_000, print_blob=True)
settings.load_profile("daskserve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in tests/integration as integration and slow."""
    for item in items:
        if (HERE / "integration") in item.path.parents:
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.slow)
