"""The names of the classes of errors, for messages, logs and traces."""

from __future__ import annotations

# Reads the values that Python stores, even if the class or its metaclass overrides these attributes.
_stored_qualname = type.__dict__["__qualname__"].__get__
_stored_module = type.__dict__["__module__"].__get__


class StandInError(Exception):
    """Base class of errors that replace an error of another class."""

    @property
    def type_name(self) -> str:
        """The name of the replaced error's class, as returned by `type_name_of`."""
        raise NotImplementedError


def type_name_of(kind: type) -> str:
    """Return the name of a class with its module, or without it for a built-in class."""
    module, name = _stored_module(kind), str(_stored_qualname(kind))
    return name if module == "builtins" or type(module) is not str else f"{module}.{name}"


def error_type(error: BaseException) -> str:
    """Return the class name of an error, or of the error that it stands in for."""
    kind = type(error)
    return error.type_name if issubclass(kind, StandInError) else type_name_of(kind)  # type: ignore[attr-defined]
