"""How many applications and deployments one configuration may declare."""

from __future__ import annotations

import json

import dask
import pytest
from controller_harness import Stage, staged
from tables import each_case

from daskserve.config_file.reading import read
from daskserve.errors import BadRequestError, ConfigFileError


def text_of(applications: int, deployments: int = 0) -> str:
    overrides = [{"name": f"d{n}"} for n in range(deployments)]
    more = {"deployments": overrides} if overrides else {}
    apps = [
        {"name": f"a{n}", "import_path": "shop:app", "route_prefix": f"/{n}", **more}
        for n in range(applications)
    ]
    return json.dumps({"applications": apps})


@each_case(
    "applications, deployments, problem",
    [
        (3, 2, ""),
        (4, 0, "has 4 applications, and at most 3 are allowed"),
        (2, 4, "has 8 deployments, and at most 6 are allowed.*daskserve.controller.max-deployments"),
    ],
)
def test_a_file_with_too_much_is_refused_in_one_line(
    applications: int, deployments: int, problem: str
) -> None:
    limits = {"daskserve.controller.max-applications": 3, "daskserve.controller.max-deployments": 6}
    with dask.config.set(limits):
        if not problem:
            read(text_of(applications, deployments), "serve.json")
            return
        with pytest.raises(ConfigFileError, match=problem) as caught:
            read(text_of(applications, deployments), "serve.json")
        assert str(caught.value).count("\n") == 0


def test_the_applications_of_all_documents_of_a_file_count() -> None:
    with dask.config.set({"daskserve.controller.max-applications": 3}):
        with pytest.raises(ConfigFileError, match="has 4 applications, and at most 3 are allowed"):
            read(f"{text_of(2)}\n---\n{text_of(2)}")


@staged(workers=2)
async def test_the_controller_refuses_what_comes_without_a_file(stage: Stage) -> None:
    config = json.loads(text_of(3))
    with dask.config.set({"daskserve.controller.max-applications": 2}):
        for verb in ("apply_config", "plan_config"):
            with pytest.raises(BadRequestError, match=r"^The configuration has 3 applications"):
                await stage.call(verb, config=config)
    assert not stage.stored("config")
