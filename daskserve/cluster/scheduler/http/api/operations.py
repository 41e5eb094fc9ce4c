"""The table of the REST API: paths, methods, and the verbs of the controller that they call.

The handler, the OpenAPI document and its page are made from this table. Operations that Ray Serve also has
use Ray Serve's paths and schemas.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from daskserve.cluster.scheduler.http.api import inspecting, logs
from daskserve.cluster.scheduler.http.api.requests import MAX_SHOWN, APIRequest, Document
from daskserve.common.formatting import counted
from daskserve.errors import BadRequestError
from daskserve.options.fields.bounds import KEY, number_in
from daskserve.options.specs import deployment_tag

#: Maximum size of a body that is a number or a few fields; a valid one has less than a hundred bytes.
SMALL_BYTES = 4096
#: Maximum size of a configuration; one of a thousand applications has about 500 KB.
MAX_CONFIG_BYTES = 8 << 20
#: How long a plan may take: its applications are built, which imports their modules.
PLAN_S = 600.0
#: Timeout of an answer that waits for the first rates, which need two totals that are a second apart.
LIVE_WAIT_S = 4.0
#: The file extension for each content type, which selects the parser.
_ENDINGS: Mapping[str, str] = {"application/json": "json", "application/toml": "toml"}

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes
    ----------
    path : str
        The path, with names in braces.
    verb : callable
        Returns the verb of the controller for a request, and its message.
    answer : callable
        Returns the body of the answer.
    body : str
        The kind of the body: ``configuration``, ``number``, ``revision``, ``model``, or nothing.
    query : dict
        The parameters, each with its type and description.
    is_conditional : bool
        Whether ``If-Match`` is respected, or the answer has an ``ETag``.
    is_guarded : bool
        Whether the verb itself decides if a change over HTTP is allowed.
    is_stream : bool
        Whether the answer can be followed, as server-sent events.
    """

    method: str
    path: str
    summary: str
    verb: Callable[[APIRequest], tuple[str, Message]]
    answer: Callable[[APIRequest, Any], Any] = lambda request, value: value
    body: str = ""
    query: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_conditional: bool = False
    is_guarded: bool = False
    is_stream: bool = False

    def check(self, query: Mapping[str, str]) -> None:
        """Raise `BadRequestError` for an unknown parameter of a change, because the parameter might limit the
        change."""
        unknown = [each for each in query if each not in self.query]
        if unknown and self.changes:
            wrong = unknown[0][:MAX_SHOWN]
            known = ", ".join(self.query) or "none"
            raise BadRequestError(f"This request has no parameter {wrong!r}; it has: {known}.")

    @property
    def changes(self) -> bool:
        """Whether the operation changes applications, or imports code, as a plan does."""
        return self.method != "GET"

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a body."""
        return MAX_CONFIG_BYTES if self.body == "configuration" else SMALL_BYTES

    @property
    def pattern(self) -> str:
        """A regular expression for the path below the scheduler's prefix, with or without an instance."""
        named = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path.rstrip("/"))
        return f"(?:/daskserve/(?P<instance>[^/]+))?{named}/?"


def _text(request: APIRequest) -> Message:
    ending = _ENDINGS.get(request.content_type.partition(";")[0].strip().lower(), "yaml")
    try:
        text = request.body.decode()
    except UnicodeDecodeError:
        raise BadRequestError("the body is not UTF-8") from None
    return {"text": text, "name": f"body.{ending}", "merge": request.flag("merge")}


def _put(request: APIRequest) -> tuple[str, Message]:
    if request.flag("dry_run"):
        return "plan_text", _text(request)
    more = {
        "expected_version": request.expected,
        "by": request.by,
        "version": request.query.get("version", ""),
    }
    return "apply_text", {**_text(request), **more, "request_id": uuid.uuid4().hex}


def _change(verb: str, *names: str) -> Callable[[APIRequest], tuple[str, Message]]:
    """Return the function that builds the controller call for an operation that changes the path's object.

    A retried request changes the object only once.
    """

    def message(request: APIRequest) -> tuple[str, Message]:
        found: Message = {name: request.path[name] for name in names}
        return verb, {**found, "by": request.by, "request_id": uuid.uuid4().hex}

    return message


def _rollout(
    verb: str, more: Callable[[APIRequest], Message] = lambda request: {"by": request.by}
) -> Callable[[APIRequest], tuple[str, Message]]:
    """Return the function that builds the controller call for an operation on a rollout.

    The rollout is that of the deployment in the path, or of its model.
    """

    def message(request: APIRequest) -> tuple[str, Message]:
        found: Message = {"name": request.path["deployment"], "application": request.path["application"]}
        model = {"model": request.path["model"]} if "model" in request.path else {}
        return verb, found | model | more(request)

    return message


def _promotion(request: APIRequest) -> Message:
    return {"full": request.flag("full"), "by": request.by, "request_id": uuid.uuid4().hex}


def _models(verb: str) -> Callable[[APIRequest], tuple[str, Message]]:
    """Return the function that builds the controller call for an operation on a deployment's models.

    The path names the deployment.
    """

    def message(request: APIRequest) -> tuple[str, Message]:
        found: Message = {"name": deployment_tag(request.path["application"], request.path["deployment"])}
        if "model" not in request.path:
            return verb, found
        fields, found["model"] = request.fields("version", "default"), request.path["model"]
        version, is_default = fields.get("version"), fields.get("default", True)
        if not isinstance(version, str | None) or (version is None and verb == "set_default_model"):
            raise BadRequestError(f"version must be a string, got {version!r}")
        if not isinstance(is_default, bool):
            raise BadRequestError(f"default must be true or false, got {is_default!r}")
        found["version"], found["by"] = version, request.by
        if verb == "load_model":
            found["is_default"] = is_default
        elif verb == "unload_model":
            found["request_id"] = uuid.uuid4().hex
        return verb, found

    return message


def _without_snapshot(request: APIRequest, value: Any) -> Any:
    return {name: each for name, each in value.items() if name != "snapshot"}


def _scale(request: APIRequest, **by: str) -> tuple[str, Message]:
    name, number = request.path.get("deployment", ""), number_in(request.body)
    return "scale", {"application": request.path["application"], "name": name, "number": number, **by}


def _scaled(request: APIRequest, number: Any) -> Any:
    what = request.path.get("deployment", "The ingress")
    text = f"{what} of application {request.path['application']} is to have {counted(number, 'replica')}."
    return {KEY: number, "message": text}


def _rollback(request: APIRequest) -> tuple[str, Message]:
    revision = request.fields("revision").get("revision")
    is_number = isinstance(revision, int) and not isinstance(revision, bool) and abs(revision) < 10**18
    if revision is not None and not is_number:
        raise BadRequestError(f"revision must be a whole number, such as 3, got {repr(revision)[:MAX_SHOWN]}")
    message = {"app": request.path["application"], "revision": revision, "by": request.by}
    return "rollback", {**message, "request_id": uuid.uuid4().hex}


def _events(request: APIRequest) -> tuple[str, Message]:
    message: Message = {"after": request.number("after"), "application": request.query.get("application")}
    limit = request.number("limit")
    return "events", message | ({} if limit is None else {"limit": limit})


def may_take_s(verb: str, message: Message) -> float:
    """Return how long a verb may take in addition to a controller's usual answer."""
    if verb == "logs":
        return logs.takes_s(message)
    return PLAN_S if verb == "plan_text" else inspecting.takes_s(verb, message)


def _accepted(request: APIRequest, value: Any) -> Any:
    return {"accepted": True, **({"goal": value["goal"]} if value and value.get("goal") else {})}


def _shown_profile(request: APIRequest, value: Any) -> Any:
    found = inspecting.document(request.query, value)
    return value if found is None else Document(*found)


def _delete(request: APIRequest) -> tuple[str, Message]:
    return "delete_application", {
        "name": request.path["application"],
        "by": request.by,
        "expected_version": request.expected,
        "missing_ok": False,
    }


def _rollout_operations(path: str, what: str, abort: str) -> tuple[Operation, ...]:
    """Return the operations for the rollout of a deployment or a model."""
    return (
        Operation(
            "GET",
            path,
            f"The progress of the rollout of a {what}, with the metrics of its gates, or the end of the "
            "last one.",
            _rollout("rollout_status", lambda request: {}),
        ),
        Operation(
            "POST",
            f"{path}/pause",
            "Keep a rollout at its current step; its gates stay in force.",
            _rollout("pause_rollout"),
            _without_snapshot,
        ),
        Operation(
            "POST",
            f"{path}/promote",
            "Let a rollout go on to its next step, whatever it waits for.",
            _rollout("promote_rollout", _promotion),
            _without_snapshot,
            query={"full": ("boolean", "Skip all other steps.")},
        ),
        Operation(
            "POST",
            f"{path}/abort",
            abort,
            _rollout("abort_rollout"),
            _without_snapshot,
        ),
    )


ALL = "/api/serve/applications/"
ONE = "/api/serve/applications/{application}"
NAMED = f"{ONE}/deployments/{{deployment}}"
ROLLOUT = f"{NAMED}/rollout"
MODELS = f"{NAMED}/models"
_MERGE: Mapping[str, tuple[str, str]] = {
    "merge": ("boolean", "Leave all that the configuration does not name as it is.")
}

OPERATIONS: Sequence[Operation] = (
    Operation(
        "GET",
        ALL,
        "The status of applications, deployments and proxies, in Ray Serve's format. The ETag is the "
        "version of the configuration.",
        lambda request: ("details", {"api_type": request.query.get("api_type")}),
        lambda request, value: value["details"],
        query={"api_type": ("string", "Only applications of files (declarative) or programs (imperative).")},
        is_conditional=True,
    ),
    Operation(
        "PUT",
        ALL,
        "Deploy a configuration: JSON, YAML or TOML, by Content-Type. Returns once it is accepted.",
        _put,
        body="configuration",
        query={
            **_MERGE,
            "dry_run": ("boolean", "Return the plan without changing anything."),
            "version": ("string", "Version of the file, such as a Git commit, for the history."),
        },
        is_conditional=True,
    ),
    Operation(
        "DELETE",
        ALL,
        "Delete all applications, including those of programs. The instance keeps running.",
        lambda request: (
            "delete_applications",
            {"by": request.by, "expected_version": request.expected, "request_id": uuid.uuid4().hex},
        ),
        is_conditional=True,
    ),
    Operation(
        "POST",
        "/api/serve/plan",
        "The changes that a configuration would make.",
        lambda request: ("plan_text", _text(request)),
        body="configuration",
        query=_MERGE,
    ),
    Operation(
        "GET",
        "/api/serve/config",
        "The deployed configuration, with references to variables and secrets as in the file.",
        lambda request: ("get_config", {"is_masked": True}),
        is_conditional=True,
    ),
    Operation(
        "GET",
        "/api/serve/schema",
        "The JSON Schema of configurations.",
        lambda request: ("config_schema", {}),
    ),
    Operation(
        "GET",
        ONE,
        "One application, in Ray Serve's shape.",
        lambda request: ("details", {"name": request.path["application"]}),
        lambda request, value: value["details"]["applications"][request.path["application"]],
        is_conditional=True,
    ),
    Operation("DELETE", ONE, "Delete an application.", _delete, _accepted, is_conditional=True),
    Operation(
        "GET",
        f"{ONE}/history",
        "The last revisions of an application: who, when, what changed, how it ended.",
        lambda request: ("history", {"app": request.path["application"]}),
    ),
    Operation(
        "POST",
        f"{ONE}/rollback",
        "Deploy an earlier revision again; by default the last one that ran.",
        _rollback,
        _accepted,
        body="revision",
    ),
    Operation(
        "POST",
        f"{ONE}/restart",
        "Replace all replicas of an application by ones of the same code.",
        _change("restart", "application"),
        _accepted,
    ),
    Operation(
        "POST",
        f"{ONE}/deployments/{{deployment}}/restart",
        "Replace the replicas of a deployment by ones of the same code.",
        _change("restart", "application", "deployment"),
        _accepted,
    ),
    Operation(
        "GET", f"{NAMED}/explain", "Why a deployment has as many replicas as it has.", _models("explain")
    ),
    Operation(
        "POST",
        f"{NAMED}/num_replicas",
        "Set the number of replicas of a deployment without autoscaling, until it is deployed again.",
        lambda request: _scale(request, by=request.by),
        _scaled,
        "number",
    ),
    *_rollout_operations(ROLLOUT, "deployment", "Give the old version all traffic, and undo the change."),
    Operation(
        "GET",
        MODELS,
        "The models of a deployment with a model_repository, and the versions of each with their states.",
        _models("list_models"),
    ),
    Operation(
        "POST",
        f"{MODELS}/{{model}}/load",
        "Have all replicas load a version of a model, by default the newest; returns once it is accepted.",
        _models("load_model"),
        body="model",
    ),
    Operation(
        "POST",
        f"{MODELS}/{{model}}/unload",
        "Have all replicas unload a version of a model, by default all versions.",
        _models("unload_model"),
        _accepted,
        body="model",
    ),
    Operation(
        "POST",
        f"{MODELS}/{{model}}/default",
        "Set the default version of a model.",
        _models("set_default_model"),
        _accepted,
        body="model",
    ),
    *_rollout_operations(
        f"{MODELS}/{{model}}/rollout", "model", "Give the old version of a model all requests."
    ),
    Operation(
        "GET",
        "/api/serve/replicas/{replica}/profile",
        "Profile the code of a replica, or of the busiest replica of a deployment, for some time.",
        inspecting.profile,
        _shown_profile,
        query=inspecting.QUERY,
    ),
    Operation(
        "GET",
        "/api/serve/replicas/{replica}/stacks",
        "The stacks of the threads and tasks of a replica, even if they are stuck.",
        lambda request: ("stacks", {"replica": request.path["replica"]}),
    ),
    Operation(
        "POST",
        "/api/v1/applications/{application}/deployments/{deployment}/scale",
        "Set the number of replicas of a deployment with external_scaler_enabled.",
        _scale,
        _scaled,
        body="number",
        is_guarded=True,
    ),
    Operation(
        "POST",
        "/api/v1/applications/{application}/scale",
        "Set the number of replicas of an application's ingress with external_scaler_enabled.",
        _scale,
        _scaled,
        body="number",
        is_guarded=True,
    ),
    Operation(
        "GET",
        "/api/serve/events",
        "What has happened, oldest first; with Accept: text/event-stream, as server-sent events.",
        _events,
        query={
            "after": ("integer", "The number of the last event that was seen. Default: the newest ones."),
            "application": ("string", "Only events of this application."),
            "limit": ("integer", "How many at most."),
        },
        is_stream=True,
    ),
    Operation(
        "GET",
        "/api/serve/logs",
        "The log records of all workers, in the order of their times, and a cursor; with Accept: "
        "text/event-stream, the new ones, too.",
        lambda request: ("logs", logs.message(request.query, request.number)),
        query=logs.QUERY,
        is_stream=True,
    ),
    Operation(
        "GET",
        "/api/serve/metrics/live",
        "The rates, latencies and queues of the last second; with Accept: text/event-stream, every second.",
        lambda request: ("live_metrics", {"wait_s": LIVE_WAIT_S}),
        is_stream=True,
    ),
)


def by_path() -> dict[str, dict[str, Operation]]:
    """Return the operations by path and method."""
    found: dict[str, dict[str, Operation]] = {}
    for each in OPERATIONS:
        found.setdefault(each.path, {})[each.method] = each
    return found
