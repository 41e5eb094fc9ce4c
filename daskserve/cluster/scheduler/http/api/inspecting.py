"""Profiles and stacks of replicas over HTTP: parameters, and the formats of the answer. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from daskserve.cluster.scheduler.http.api.requests import APIRequest
from daskserve.errors import BadRequestError
from daskserve.telemetry.profiling.flame import flame_page, flame_svg, page_policy
from daskserve.telemetry.profiling.report import text

#: Default length of a profile, and the additional time for profiling the memory of a large process.
SECONDS, MEMORY_S = 5.0, 35.0
_NUMBER = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,6})?")
QUERY: Mapping[str, tuple[str, str]] = {
    "seconds": ("number", "How long to look, at most 60. Default: 5."),
    "format": ("string", "json (the default), svg, html or text."),
    "memory": ("boolean", "Find the lines that hold memory instead; not as svg."),
}
_SVG_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
#: For each format: the content type, the function that writes it, and the content security policy.
_FORMS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str], str]] = {
    "svg": ("image/svg+xml", flame_svg, _SVG_POLICY),
    "html": ("text/html", flame_page, page_policy()),
    "text": ("text/plain", text, _SVG_POLICY),
}


def profile(request: APIRequest) -> tuple[str, dict[str, Any]]:
    """Return the verb and the message for a request of a profile."""
    query, memory = request.query, request.flag("memory")
    kind, given = query.get("format", "json"), query.get("seconds", "")
    if kind != "json" and kind not in _FORMS:
        raise BadRequestError(f"The parameter format={kind[:40]!r} must be json, {', '.join(_FORMS)}.")
    if given and not _NUMBER.fullmatch(given):
        raise BadRequestError(f"The parameter seconds={given[:40]!r} must be a number from 0 to 9999.")
    if memory and kind == "svg":
        raise BadRequestError("A memory profile has no stacks; leave out memory=true or format=svg.")
    seconds = float(given) if given else SECONDS
    return "profile", {"replica": request.path["replica"], "seconds": seconds, "memory": memory}


def document(query: Mapping[str, str], value: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the content type, text and policy of an answer that is not JSON."""
    form = _FORMS.get(query.get("format", "json"))
    return None if form is None else (form[0], form[1](value), form[2])


def takes_s(verb: str, message: Mapping[str, Any]) -> float:
    """Return how long a verb samples, in seconds."""
    if verb != "profile":
        return 0.0
    return float(message["seconds"]) + (MEMORY_S if message["memory"] else 0.0)
