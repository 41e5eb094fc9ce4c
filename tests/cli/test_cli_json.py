"""``--json``, and the ranges of numbers, of all commands."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from daskserve.cli.main import main

pytestmark = pytest.mark.smoke

#: Commands that serve, or that print text for another program.
WITHOUT = {
    *("completion", "docs", "run"),
    *("metrics grafana", "metrics rules", "metrics scrape-config", "metrics targets"),
}


def commands(found: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    if not isinstance(found, click.Group):
        yield name, found
        return
    context = click.Context(found)
    for each in found.list_commands(context):
        inner = found.get_command(context, each)
        assert inner is not None
        yield from commands(inner, f"{name} {each}".strip())


def test_every_command_that_prints_data_has_it() -> None:
    without = {
        name for name, each in commands(main) if not any("--json" in option.opts for option in each.params)
    }
    assert without == WITHOUT


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("scale", "x", "0", "--json"), "Invalid value for 'N': 0 is not in the range"),
        (("scale", "--json"), "Missing argument 'APP[/DEPLOYMENT]'"),
        (("logs", "--since", "3x", "--json"), "'3x' is not a time"),
        (("rollout", "status", "--json"), "Missing argument"),
        (("store", "restore", "none", "x", "--json"), "'none' does not exist"),
        (("status", "--json", "--address", ""), "Give --address"),
    ],
)
def test_a_wrong_use_is_an_error_in_json(arguments: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(main, arguments)
    # click before 8.2 does not tell the two streams apart.
    error = json.loads(result.output)["error"]
    assert (result.exit_code, text in error["message"]) == (2, True), result.output


def test_every_command_and_every_option_has_a_description() -> None:
    without = [name for name, each in commands(main) if not each.help]
    without += [
        f"{name} {option.name}"
        for name, each in commands(main)
        for option in each.params
        if isinstance(option, click.Option) and not option.help and not option.hidden
    ]
    assert without == []


def test_no_range_of_numbers_has_nan_or_infinity_in_it() -> None:
    ranges = [
        option.type
        for _, each in commands(main)
        for option in each.params
        if isinstance(option.type, click.FloatRange)
    ]
    assert len(ranges) >= 10
    for each in ranges:
        for text in ("nan", "inf"):
            with pytest.raises(click.BadParameter):
                each.convert(text, None, None)


def test_all_metrics_are_listed() -> None:
    found = json.loads(CliRunner().invoke(main, ["metrics", "list", "--json"]).stdout)
    kinds = {each["name"]: each["kind"] for each in found}
    assert kinds["daskserve_http_requests_total"] == "counter"
