"""An extension of griffe, which reads the API for the site, for functions that are made from coroutines.

The modules of `daskserve.client.functions` have one private coroutine for two public names, as in
``run = blocking(_run)`` and ``run_async = awaitable(_run)``; or the verb of a client, as in
``scale = blocking(of_default(ClientVerbs.scale))``.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

MADE = re.compile(r"(?:blocking|awaitable)\((?:of_default\(ClientVerbs\.(\w+)\)|(\w+))\)")
#: The modules whose classes have the verbs of clients.
VERBS = "client.verbs"


class MadeFunctions(griffe.Extension):
    """Give the public names the signature and the docstring of their coroutine."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        modules = [pkg["client.client"], *pkg[VERBS].modules.values()]
        classes = [each for module in modules for each in module.classes.values() if not each.is_alias]
        found = [verb for each in classes for verb in each.functions.values() if not verb.is_alias]
        self._verbs = {verb.name: verb for verb in found}
        self._visit(pkg)

    def _visit(self, module: griffe.Module) -> None:
        for name, member in list(module.members.items()):
            if member.is_alias:
                continue
            if isinstance(member, griffe.Module):
                self._visit(member)
            elif isinstance(member, griffe.Attribute) and (made := MADE.fullmatch(str(member.value))):
                body = module.members.get(made[2]) if made[2] else self._verbs.get(made[1])
                if isinstance(body, griffe.Function):
                    module.set_member(name, self._function(member, body))

    @staticmethod
    def _function(public: griffe.Attribute, body: griffe.Function) -> griffe.Function:
        users = (each for each in body.parameters if each.name not in ("form", "self"))
        given = [each for each in users if not each.name.startswith("_")]
        found = griffe.Function(
            public.name,
            lineno=public.lineno,
            endlineno=public.endlineno,
            parameters=griffe.Parameters(*given),
            returns=body.returns,
            docstring=body.docstring,
        )
        found.labels |= {"async"} if public.name.endswith("_async") else set()
        return found
