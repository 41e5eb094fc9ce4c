"""Names of applications and deployments may contain any characters, even the separators of tags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tables import each_case

import daskserve as serve
from daskserve.client.client import Client
from daskserve.common.types import described, name_in, split_deployment_tag, tag_part
from daskserve.errors import BadRequestError, MethodNotFoundError, NotFoundError
from daskserve.options.specs import deployment_tag
from daskserve.testing import local_instance

NAMES = ["model", "a/b", "a#1", "/", "#", "50%", "100%25", "a%2Fb", "%252F", "a/b#c%2Fd", "größe 1:2"]


@each_case("name", NAMES)
def test_a_part_of_a_tag_stands_for_one_name(name: str) -> None:
    assert name_in(tag_part(name)) == name
    assert not {"/", "#"} & {*tag_part(name)}
    for application in NAMES:
        assert split_deployment_tag(deployment_tag(application, name)) == (application, name)
    assert described(deployment_tag("x/y", name)) == f"deployment {name!r} of application 'x/y'"


@each_case("name", ["a\nb", "\x1b[31m", "\x85", "\ud800"])
def test_a_name_that_would_act_on_a_terminal_or_cannot_be_stored_is_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match="name must not have control characters"):
        serve.deployment(name=name)(len)


def test_names_without_these_characters_are_as_they_are() -> None:
    assert [tag_part(each) for each in ("model", "50%", "größe 1:2")] == ["model", "50%", "größe 1:2"]
    assert len({tag_part(each) for each in NAMES}) == len(NAMES)


@serve.deployment(name="back/1#x")
class Back:
    def __call__(self, number: int) -> int:
        return number + 1


@serve.deployment(name="front/1")
class Front:
    def __init__(self, back: serve.Handle) -> None:
        self.back = back

    async def __call__(self) -> list[Any]:
        context = serve.get_replica_context()
        other = await serve.get_deployment_handle_async("back/1#x")
        return [context.app_name, context.deployment, await self.back.remote(1), await other.remote(2)]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with local_instance() as client:
        yield client


@pytest.mark.parametrize("name", ["x/y", "z#1", "default"])
def test_an_application_with_such_names_works(client: Client, name: str) -> None:
    handle = client.run(Front.bind(Back.bind()), name=name, route_prefix=None)
    assert (handle.app_name, handle.deployment_name) == (name, "front/1")
    assert handle.remote().result(10) == [name, "front/1", 2, 3]
    assert client.get_app_handle(name).remote().result(10)[0] == name
    assert client.get_deployment_handle("back/1#x", name).remote(3).result(10) == 4
    with pytest.raises(NotFoundError, match=f"Deployment 'b/2' in application '{name}' does not exist"):
        client.get_deployment_handle("b/2", name)
    with pytest.raises(MethodNotFoundError, match=r"^Deployment 'front/1'.* has no method 'other'"):
        _ = handle.other
    found = client.status().applications[name]
    assert (found.status, set(found.deployments)) == ("RUNNING", {"front/1", "back/1#x"})
    client.delete_application(name)
    assert name not in client.status().applications


def test_a_classic_deployment_with_such_a_name_works() -> None:
    deployment = serve.deployment(name="c/2#3", route_prefix=None)(Back.func_or_class)
    serve.run(Back.bind(), local=True, name="unrelated")
    try:
        deployment.deploy()
        assert deployment.get_handle().remote(1).result() == 2
        assert "c/2#3" in serve.list_deployments()
        assert serve.get_deployment("c/2#3") == deployment
        serve.get_deployment("c/2#3").delete()
        assert "c/2#3" not in serve.list_deployments()
    finally:
        serve.shutdown()
