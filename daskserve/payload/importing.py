"""Imports objects by their paths: ``"pkg.mod.Name"`` or ``"pkg.mod:Name"``."""

from __future__ import annotations

import importlib
from typing import Any

from daskserve.common.types import split_import_path
from daskserve.errors import BadRequestError
from daskserve.payload.error_text import summary_of

MODULE_REMEDY = "Install it on the workers, too, or put its folder on their PYTHONPATH."


def import_definition(path: str) -> Any:
    """Import and return the object that ``"pkg.mod.Name"`` or ``"pkg.mod:Name"`` names.

    Raises
    ------
    BadRequestError
        The path has another form, there is no such module, or the module has no such name. Errors raised
        by the module itself, such as a missing import, are not changed.
    """
    module_name, name = split_import_path(path)
    if not module_name:
        raise BadRequestError(f"Import path {path!r} must have the form 'pkg.mod.Name' or 'pkg.mod:Name'.")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise
        raise BadRequestError(
            f"Import path {path!r}: there is no module {missing!r} here. {MODULE_REMEDY}"
        ) from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise BadRequestError(f"Import path {path!r}: {module_name} has no {name!r}.") from error
    return found


def call_imported(path: str, option: str) -> Any:
    """Call the function that an import path names, without arguments, and return its result.

    Raises
    ------
    BadRequestError
        The function cannot be imported, is none, or raised; the message names the option.
    """
    try:
        return import_definition(path)()
    except Exception as error:
        # A user's function may raise anything.
        raise BadRequestError(f"{option}={path!r} failed: {summary_of(error)}") from error
