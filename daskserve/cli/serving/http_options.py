"""The HTTP options of an instance as options of a command, derived from the fields of `HTTPOptions`."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from daskserve.cli.output import options
from daskserve.common import settings
from daskserve.common.types import Location
from daskserve.options.http import HTTPOptions

#: Options that hold Python objects, which cannot be given on a command line.
_OBJECTS = frozenset({"middlewares"})
#: The proxies that uvicorn trusts by default.
_TRUSTED_BY_UVICORN = "127.0.0.1"
_ALL_NETWORKS = ("0.0.0.0/0", "::/0")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def _option(name: str, field: FieldInfo) -> Callable[..., Any]:
    spelling, description = name.replace("_", "-"), _plain(field.description or "")
    kinds = [each for each in (field.annotation, *get_args(field.annotation)) if isinstance(each, type)]
    if bool in kinds:
        return click.option(
            f"--{spelling}/--no-{spelling}",
            name,
            default=None,
            help=f"{description} Default: {field.default}.",
        )
    if get_origin(field.annotation) is list:
        return click.option(
            f"--{spelling}", name, multiple=True, help=f"{description} May be repeated. Default: none."
        )
    kind: Any = str
    if get_origin(field.annotation) is Literal:
        kind = click.Choice(get_args(field.annotation))
    elif any(issubclass(each, enum.Enum) for each in kinds):
        kind = click.Choice([str(each) for each in Location])
    elif float in kinds:
        kind = float
    elif int in kinds and not _is_bytes(field):
        kind = int
    default = repr(str(field.default) if isinstance(field.default, enum.Enum) else field.default)
    return click.option(f"--{spelling}", name, type=kind, help=f"{description} Default: {default}.")


def _is_bytes(field: FieldInfo) -> bool:
    """Return whether an option is a number of bytes, which may have a unit, such as ``64 MiB``."""
    return "BeforeValidator" in repr((field.annotation, field.metadata))


def _plain(description: str) -> str:
    """Return a description as plain text, without markup."""
    return _LINK.sub(r"\1", description).replace("``", "")


#: The options of `HTTPOptions`, and uvicorn's and Ray Serve's names of some. `given_http_options` collects
#: their values.
http_options = options(
    click.option(
        "--forwarded-allow-ips",
        help="Addresses and networks for --proxy-headers, separated by commas; * means all. Default: the "
        f"variable FORWARDED_ALLOW_IPS, or {_TRUSTED_BY_UVICORN}.",
    ),
    click.option(
        "--proxy-headers/--no-proxy-headers",
        default=None,
        help="uvicorn's form of --trusted-forwarders: trust the addresses of --forwarded-allow-ips, or none.",
    ),
    click.option(
        "--proxy-location",
        type=click.Choice([*map(str, Location), "Disabled"]),
        help="Ray Serve's name of --location.",
    ),
    click.option("--http-port", type=int, help="Ray Serve's name of --port."),
    click.option("--http-host", help="Ray Serve's name of --host."),
    *(_option(name, field) for name, field in HTTPOptions.model_fields.items() if name not in _OBJECTS),
)


def given_http_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the HTTP options that were given, under the names of `HTTPOptions`.

    Raises
    ------
    click.UsageError
        Two names of one option were given.
    """
    given = {name: value for name, value in values.items() if value is not None and value != ()}
    found = {name: given[name] for name in HTTPOptions.model_fields if name in given}
    found |= {name: list(value) for name, value in found.items() if isinstance(value, tuple)}
    others = {"host": given.get("http_host"), "port": given.get("http_port")}
    others |= {"location": given.get("proxy_location"), "trusted_forwarders": _trusted(given)}
    for name, value in others.items():
        if value is None:
            continue
        if name in found:
            raise click.UsageError(
                f"--{name.replace('_', '-')} is given under two names; leave one of them out."
            )
        found[name] = value
    return found


def _trusted(given: Mapping[str, Any]) -> list[str] | None:
    """Return the addresses that uvicorn's options name; None if none of these options is given."""
    wants, addresses = given.get("proxy_headers"), given.get("forwarded_allow_ips")
    if wants is False:
        return []
    if wants is None and addresses is None:
        return None
    text = addresses
    if text is None:
        text = settings.process_variables().get("FORWARDED_ALLOW_IPS", _TRUSTED_BY_UVICORN)
    names = [each.strip() for each in text.split(",") if each.strip()]
    return list(_ALL_NETWORKS) if "*" in names else names
