"""The undocumented parts of Tornado that daskserve uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from daskserve.internals.checking import needs

with needs("tornado", ">=6.6,<6.7") as check:
    from tornado.routing import PathMatches, Rule, RuleRouter
    from tornado.web import Application, RequestHandler

    check.fields(Application, "default_router", "wildcard_router")
    check.fields(RuleRouter, "rules")
    check.fields(Rule, "matcher")
    check.fields(PathMatches, "regex")


def path_patterns(application: Application) -> Iterator[str]:
    """Yield the regular expressions of the routes with which an application was created."""
    for rule in application.wildcard_router.rules:
        if isinstance(rule.matcher, PathMatches):
            yield rule.matcher.regex.pattern


def add_route(
    application: Application, path: str, handler: type[RequestHandler], arguments: Mapping[str, Any]
) -> Rule:
    """Add a route for every host to an application that already serves, and return it for `remove_route`.

    Parameters
    ----------
    path
        A regular expression for the whole path.
    arguments
        The arguments of the handler's ``initialize``.
    """
    rules = application.default_router.rules
    before = list(rules)
    application.add_handlers(".*$", [(path, handler, dict(arguments))])
    (added,) = (rule for rule in rules if rule not in before)
    return added


def remove_route(application: Application, route: Rule) -> None:
    """Remove a route that `add_route` added; Tornado has no method for this."""
    application.default_router.rules.remove(route)
