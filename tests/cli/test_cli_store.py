"""The command ``daskserve store``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daskserve.cli.main import main
from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.store.opening import open_store

pytestmark = pytest.mark.smoke


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/serve.db"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["store", *map(str, arguments)])


def fill(url: str, **records: bytes) -> None:
    async def scenario() -> None:
        store = open_store(url, "default")
        await store.open()
        await store.rewrite(await store.claim_epoch(), StoreChange(dict(records)))
        await store.close()

    asyncio.run(scenario())


def test_a_sound_store_is_checked_listed_backed_up_and_restored(url: str, tmp_path: Path) -> None:
    fill(url)
    for place in (url, tmp_path / "b"):
        found = run("check", place) if place == url else run("backup", url, place)
        assert (found.exit_code, found.output.splitlines()[0]) == (0, f"{url}: sound")
        assert "default   1" in run("list", place).output
    found = run("restore", tmp_path / "b", f"sqlite:///{tmp_path}/new.db", "--instance", "default")
    assert found.exit_code == 0
    assert "Restored. Start the instance on this store." in found.output
    assert run("repair", url, "--yes").output == "Nothing was missing.\n"


def test_json_is_one_document_with_what_the_text_says(url: str, tmp_path: Path) -> None:
    fill(url, **{"code/model@1": b"?"})
    found = {
        name: json.loads(run(name, *arguments, "--json").stdout)
        for name, *arguments in (
            ("check", url),
            ("backup", url, tmp_path / "b"),
            ("list", url),
            ("restore", tmp_path / "b", f"sqlite:///{tmp_path}/new.db"),
            ("repair", url, "--yes"),
        )
    }
    assert [found[name]["is_sound"] for name in ("check", "backup", "restore")] == [False, False, False]
    assert list(found["check"]["instances"]["default"]["problems"]) == ["code/model@1"]
    assert found["backup"]["size_bytes"] == (tmp_path / "b").stat().st_size
    assert found["list"] == {"default": {"epoch": 1, "deployments": {}}}
    assert set(found["repair"]) == {"place", "given_up"}
    failed = run("check", tmp_path / "nothing", "--json")
    assert (failed.exit_code, set(json.loads(failed.output)["error"])) == (2, {"type", "message"})


def test_damage_is_named_with_the_remedy_and_the_exit_code(url: str, tmp_path: Path) -> None:
    fill(url, **{"code/model@1": b"?"})
    for arguments in (("check", url), ("backup", url, tmp_path / "b"), ("check", tmp_path / "b")):
        found = run(*arguments)
        assert found.exit_code == 1
        assert "DAMAGED code/model@1: Record 'code/model@1' cannot be read" in found.output
        assert "Deploy it again." in found.output


def test_errors_are_messages(url: str, tmp_path: Path) -> None:
    (tmp_path / "garbage").write_bytes(b"garbage")
    fill(f"sqlite:///{tmp_path}/some.db")
    for arguments in (
        ("check", url),
        ("list", url),
        ("backup", url, tmp_path / "b"),
        ("restore", tmp_path / "garbage", url),
        ("backup", f"sqlite:///{tmp_path}/some.db", tmp_path / "garbage" / "below"),
        ("check", "memory://"),
        ("check", "nonsense://x"),
    ):
        found = run(*arguments)
        assert found.exit_code == 1, arguments
        assert found.output.startswith("Error: ")
        assert "Traceback" not in found.output


@pytest.mark.parametrize(
    "arguments", [("check", "none"), ("list", "none"), ("restore", "none", "sqlite:///x")]
)
def test_a_file_that_does_not_exist_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    found = run(*arguments)
    assert (found.exit_code, "'none'" in found.output) == (2, True), found.output


def test_a_store_in_use_needs_force(url: str, tmp_path: Path) -> None:
    fill(url)
    run("backup", url, tmp_path / "b")

    async def scenario() -> None:
        store = open_store(url, "default")
        await store.open()
        await store.claim_epoch()
        found = run("restore", tmp_path / "b", url)
        assert found.exit_code == 1
        assert "is in use by another process" in found.output
        assert "or pass --force, and restart the instance afterwards" in found.output
        assert run("restore", tmp_path / "b", url, "--force").exit_code == 0
        await store.close()

    asyncio.run(scenario())


def test_a_repair_asks_first(url: str, tmp_path: Path) -> None:
    fill(url)
    assert run("repair", url).exit_code == 1
