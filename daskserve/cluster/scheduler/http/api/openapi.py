"""The OpenAPI document of the REST API, made from the table of operations. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from daskserve._version import __version__
from daskserve.cluster.scheduler.http.api.operations import OPERATIONS, Operation
from daskserve.options.fields.bounds import KEY

PAGE_PATH = "/daskserve/api"
DOCUMENT_PATH = "/daskserve/openapi.json"
SCHEMA_PATH = "/api/serve/schema"
#: Ray Serve's REST client requests this first.
RAY_VERSION_PATH = "/api/ray/version"
#: The release of Ray whose paths and schemas the API follows.
RAY_VERSION = "2.60.0"
#: Description of the API.
NOTE = (
    "If several instances run on the cluster, put /daskserve/INSTANCE before the path; without it, the "
    "common instance is meant. Requests of pages of other sites are refused with 403."
)
_BODIES: Mapping[str, Mapping[str, Any]] = {
    "configuration": {
        "application/json": {"schema": {"$ref": SCHEMA_PATH}},
        "application/yaml": {"schema": {"type": "string"}},
        "application/toml": {"schema": {"type": "string"}},
    },
    "number": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": [KEY],
                "properties": {KEY: {"type": "integer", "minimum": 1}},
            }
        }
    },
    "revision": {
        "application/json": {
            "schema": {"type": "object", "properties": {"revision": {"type": "integer", "minimum": 1}}}
        }
    },
    "model": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {"version": {"type": "string"}, "default": {"type": "boolean"}},
            }
        }
    },
}


def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    instance = {"default": "daskserve", "description": "The name of the instance."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "daskserve", "version": __version__, "description": NOTE},
        "servers": [
            {"url": "/", "description": "The common instance."},
            {"url": "/daskserve/{instance}", "variables": {"instance": instance}},
        ],
        "paths": paths,
        "components": {
            "schemas": {
                "Error": {
                    "type": "object",
                    "required": ["message"],
                    "properties": {"message": {"type": "string"}},
                }
            }
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", operation.path)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    parameters += [
        {"name": name, "in": "query", "description": text, "schema": {"type": kind}}
        for name, (kind, text) in operation.query.items()
    ]
    if operation.is_conditional and operation.changes:
        parameters.append(
            {
                "name": "If-Match",
                "in": "header",
                "description": "The ETag of an earlier response: 412 if the version has changed since.",
                "schema": {"type": "string"},
            }
        )
    words = re.findall(r"\w+", operation.path.replace("/api/serve", "").replace("/api/v1", ""))
    found: dict[str, Any] = {
        "operationId": "_".join([operation.method.lower(), *words]),
        "summary": operation.summary,
        "parameters": parameters,
        "responses": {str(code): _answer(code, operation) for code in _codes(operation)},
    }
    if operation.body:
        is_needed = operation.body in ("configuration", "number")
        found["requestBody"] = {"required": is_needed, "content": _BODIES[operation.body]}
    return found


def _codes(operation: Operation) -> list[int]:
    codes = [200, 400, 403, 404, 503]
    if operation.changes and (operation.is_conditional or operation.is_guarded):
        codes.append(412)
    if operation.body:
        codes.append(413)
    return sorted(codes)


_TEXTS: Mapping[int, str] = {
    200: "Done, or accepted.",
    400: "The request is invalid; the message says why, with the line of each mistake in a configuration.",
    403: "It comes from a page of another site, or changes over HTTP are switched off.",
    404: "There is no such instance, application or deployment.",
    412: "It was changed since it was read, or external scaling is not enabled.",
    413: "The body is too large.",
    503: "The controller is being replaced, or its store is away: call again after Retry-After.",
}


def _answer(code: int, operation: Operation) -> dict[str, Any]:
    if code != 200:
        error = {"schema": {"$ref": "#/components/schemas/Error"}}
        return {"description": _TEXTS[code], "content": {"application/json": error}}
    found: dict[str, Any] = {
        "description": _TEXTS[code],
        "content": {"application/json": {"schema": {}}},
    }
    if operation.is_stream:
        found["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    if operation.is_conditional:
        found["headers"] = {"ETag": {"schema": {"type": "string"}, "description": "The version."}}
    return found
