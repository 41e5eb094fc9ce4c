"""The built-in policies by name, and the import of users' own."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from daskserve.autoscaling import custom, latency, load, promql, queue, schedule
from daskserve.autoscaling.context import CustomPolicy, Policy
from daskserve.common.types import split_import_path
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.fields.secrets import masked

#: Functions that take the policy's keyword arguments and return the policy.
MAKERS: Mapping[str, Callable[..., Policy]] = {
    "target_ongoing_requests": load.target_ongoing_requests,
    "classic": load.classic,
    "latency": latency.latency_objective,
    "promql": promql.promql,
    "custom_metric": custom.custom_metric,
    "queue": queue.queue,
}


def load_policy(config: AutoscalingConfig, policy: CustomPolicy | None = None) -> CustomPolicy:
    """Return the policy of a config as a function.

    Parameters
    ----------
    config : AutoscalingConfig
        Names the policy and its keyword arguments.
    policy : callable, optional
        The policy itself, if the config holds it pickled.

    Raises
    ------
    ValueError
        The policy does not exist, or does not accept these arguments.
    """
    named = config.policy if policy is None else policy
    if named == "schedule":
        return _scheduled(config)
    if isinstance(named, str):
        maker = MAKERS.get(named)
        if maker is not None:
            return _made(named, maker, config.policy_kwargs)
        named = _imported(named)
    if not callable(named):
        shown = config.policy if isinstance(config.policy, str) else named
        raise ValueError(
            f"the policy {shown!r} is not callable; give a function, a class or an import path of one"
        )
    if inspect.isclass(named):
        return _made(named.__name__, named, config.policy_kwargs)
    return functools.partial(named, **config.policy_kwargs) if config.policy_kwargs else named


def _scheduled(config: AutoscalingConfig) -> CustomPolicy:
    arguments = dict(config.policy_kwargs)
    base = arguments.pop("policy", None)
    if base == "schedule":
        raise ValueError('policy "schedule" has policy="schedule" in its policy_kwargs; name another policy')
    if base is not None:
        below = config.model_copy(
            update={"policy": base, "policy_kwargs": arguments.pop("policy_kwargs", {})}
        )
        arguments["policy"] = load_policy(below)
    return _made("schedule", schedule.scheduled, arguments)


def _made(name: str, maker: Callable[..., Any], arguments: Mapping[str, Any]) -> CustomPolicy:
    try:
        inspect.signature(maker).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"the policy {name!r} does not accept policy_kwargs={masked(dict(arguments))!r}: {error}; its "
            f"signature is {name}{inspect.signature(maker)}"
        ) from None
    made: CustomPolicy = maker(**arguments)
    return made


def _imported(path: str) -> Any:
    module_name, name = split_import_path(path)
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"the policy {path!r} cannot be imported: {error}; install it where the controller runs, or pass "
            "it as a function"
        ) from error
    return found
