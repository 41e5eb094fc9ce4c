"""The Python environment of a backend.

A name is a conda environment; a path is the folder of a virtualenv or conda environment. The client checks
the form; `daskserve.data.replica.interpreters` finds the environment on the machine of the replica.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daskserve.errors import BadRequestError


@dataclass(frozen=True, slots=True)
class CondaEnv:
    """A conda environment for a backend's replicas, identified by its name on their machines.

    Parameters
    ----------
    name : str
        Name in ``conda env list``; ``base`` is the installation's own environment.

    Raises
    ------
    BadRequestError
        A `ValueError`: the name is empty or a path.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"The name of a conda environment must be a string, got {self.name!r}")
        if not self.name or self.name != self.name.strip() or "/" in self.name:
            raise BadRequestError(
                f"{self.name!r} is not the name of a conda environment; to use a folder, pass its path: "
                "env='/path/to/environment'."
            )


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter on this machine.

    Attributes
    ----------
    is_own : bool
        Whether it is the interpreter of this process, with the same packages.
    variables : mapping or None
        The environment variables of its processes; None means those of this process.
    """

    python: str
    prefix: str
    is_own: bool = True
    variables: Mapping[str, str] | None = None


def parse_environment(value: Any) -> str | None:
    """Return the serialized form of a user's ``env``: a name, an absolute path, or None.

    Raises
    ------
    TypeError, BadRequestError
        The value is neither a `CondaEnv` nor a name nor an absolute path.
    """
    if value is None:
        return None
    if isinstance(value, CondaEnv):
        return value.name
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"env must be a CondaEnv, the name of a conda environment or the path of an environment, "
            f"got {value!r}"
        )
    text = os.fspath(value)
    if not isinstance(text, str):
        raise TypeError(f"env must be text, got {value!r}")
    if os.sep not in text:
        return CondaEnv(text).name
    if not (os.path.isabs(text) or text.startswith("~")):
        raise BadRequestError(
            f"env must be an absolute path, because each worker looks it up for itself; got {text!r}"
        )
    return text
