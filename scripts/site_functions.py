"""An extension of griffe, which reads the API for the site: functions made from coroutines are functions.

The modules of `daskserve.client.functions` have one private coroutine for two public names, as in
``run = blocking(_run)`` and ``run_async = awaitable(_run)``.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

MADE = re.compile(r"(blocking|awaitable)\((\w+)\)")


class MadeFunctions(griffe.Extension):
    """Give the public names the signature and the docstring of their coroutine."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._visit(pkg)

    def _visit(self, module: griffe.Module) -> None:
        for name, member in list(module.members.items()):
            if member.is_alias:
                continue
            if isinstance(member, griffe.Module):
                self._visit(member)
            elif isinstance(member, griffe.Attribute) and (made := MADE.fullmatch(str(member.value))):
                body = module.members.get(made[2])
                if isinstance(body, griffe.Function):
                    module.set_member(name, self._function(member, body))

    @staticmethod
    def _function(public: griffe.Attribute, body: griffe.Function) -> griffe.Function:
        given = [each for each in body.parameters if each.name != "form" and not each.name.startswith("_")]
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
