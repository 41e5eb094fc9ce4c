"""Compares HTTP options with those of a running instance, which cannot change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from daskserve.client.instance.connection import Verbs
from daskserve.options.http import HTTPOptions
from daskserve.options.start_messages import dump_http

#: Options whose values in force are not known here: code, and a password.
_UNKNOWN = frozenset({"middlewares", "ssl_keyfile_password"})


async def differences(verbs: Verbs, given: HTTPOptions | Mapping[str, Any] | None) -> str:
    """Return the given options that differ from the options in force, as text; empty if all are equal.

    Any port fits port 0. An option whose value in force is not shown counts as different if it is given.
    """
    options = given if isinstance(given, HTTPOptions) else HTTPOptions(**(given or {}))
    names = options.model_fields_set
    if not names:
        return ""
    in_force: Mapping[str, Any] = await verbs._call("view", name="get_http_config")
    wanted = dump_http(options)
    found = []
    for name in sorted(names):
        if name in _UNKNOWN:
            if getattr(options, name):
                found.append(name)
        elif wanted[name] != in_force[name] and not (name == "port" and await _is_port(verbs, wanted[name])):
            found.append(f"{name} is {in_force[name]!r} instead of {wanted[name]!r}")
    return ", ".join(found)


async def _is_port(verbs: Verbs, port: int) -> bool:
    return not port or port in {urlsplit(url).port for url in await verbs._call("http_urls")}
