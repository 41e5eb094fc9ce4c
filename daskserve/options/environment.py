"""Python environments: how a backend names one, and which interpreter that is on the machine of its replica.

A name means a conda environment, a path the folder of a virtualenv or conda environment. Which folders
there are only the replica's machine knows, so a client checks the form and the worker finds the place.
Nothing here runs ``conda``, which takes a second to say what a look into its folders tells at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daskserve.errors import BadRequestError

#: Names of the root environment of a conda installation.
_BASE_NAMES = frozenset({"base", "root"})
#: Variables that would lead another interpreter to this one's modules.
_OF_THIS_INTERPRETER = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONEXECUTABLE", "__PYVENV_LAUNCHER__"})
_OF_AN_ENVIRONMENT = frozenset({"VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"})


@dataclass(frozen=True, slots=True)
class CondaEnv:
    """A conda environment for a backend's replicas, by the name it has on their machines.

    Parameters
    ----------
    name : str
        As ``conda env list`` shows it; ``base`` is the installation's own environment.

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
                f"{self.name!r} is not the name of a conda environment; to name one by its folder pass the "
                "path itself, env='/path/to/environment'."
            )


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter on this machine.

    Attributes
    ----------
    is_own : bool
        Whether it is the one that runs this process, with the same packages.
    variables : mapping or None
        The environment variables for a process of it; None hands this process's own on.
    """

    python: str
    prefix: str
    is_own: bool = True
    variables: Mapping[str, str] | None = None


def parse_environment(value: Any) -> str | None:
    """Return what a user gave as ``env`` in its travelling form: a name, an absolute path, or None for none.

    Raises
    ------
    TypeError, BadRequestError
        It is neither a `CondaEnv` nor a name nor an absolute path.
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


def find_interpreter(environment: str | None, variables: Mapping[str, str]) -> Interpreter:
    """Return the interpreter of an environment on this machine; None is this process's own.

    Parameters
    ----------
    environment : str or None
        What `parse_environment` returned.
    variables : mapping
        This process's environment variables.

    Raises
    ------
    BadRequestError
        There is no such environment here; the message lists where it was looked for.
    """
    if environment is None:
        return Interpreter(sys.executable, sys.prefix)
    is_path = os.sep in environment
    prefix = Path(environment).expanduser() if is_path else _find_conda(environment, variables)
    python = prefix / "bin" / "python"
    if not os.access(python, os.X_OK):
        what = "is not the folder of an environment" if prefix.is_dir() else "does not exist"
        raise BadRequestError(
            f"Environment {environment!r} {what} on {os.uname().nodename}: there is no interpreter {python}. "
            "Make it on every worker that may run the backend, or limit the backend to those that have it "
            "(actor_options={'workers': [...]})."
        )
    if os.path.realpath(prefix) == os.path.realpath(sys.prefix):
        return Interpreter(sys.executable, sys.prefix)
    return Interpreter(str(python), str(prefix), is_own=False, variables=_variables_in(prefix, variables))


def _find_conda(name: str, variables: Mapping[str, str]) -> Path:
    candidates = list(dict.fromkeys(_conda_candidates(name, variables)))
    for candidate in candidates:
        if (candidate / "conda-meta").is_dir():
            return candidate
    looked = ", ".join(map(str, candidates)) or "nowhere, as CONDA_EXE and CONDA_PREFIX are not set"
    raise BadRequestError(
        f"There is no conda environment {name!r} on {os.uname().nodename}; looked for: {looked}. Make it on "
        "every worker that may run the backend (conda create -n ...), or pass env='/path/to/environment'."
    )


def _conda_candidates(name: str, variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield the folders an environment of that name may have, in conda's own order."""
    roots = list(dict.fromkeys(_conda_roots(variables)))
    if name in _BASE_NAMES:
        yield from roots
        return
    for variable in ("CONDA_ENVS_DIRS", "CONDA_ENVS_PATH"):
        for folder in filter(None, variables.get(variable, "").split(os.pathsep)):
            yield Path(folder) / name
    for root in roots:
        yield root / "envs" / name
    home = Path(os.path.expanduser("~")) / ".conda"
    yield home / "envs" / name
    try:
        registered = (home / "environments.txt").read_text().splitlines()
    except OSError:
        return
    yield from (Path(line.strip()) for line in registered if Path(line.strip()).name == name)


def _conda_roots(variables: Mapping[str, str]) -> Iterator[Path]:
    if "CONDA_EXE" in variables:
        yield Path(variables["CONDA_EXE"]).parent.parent
    if "MAMBA_ROOT_PREFIX" in variables:
        yield Path(variables["MAMBA_ROOT_PREFIX"])
    # A worker may run in an environment of the installation without its having been activated.
    for prefix in filter(None, (variables.get("CONDA_PREFIX"), sys.prefix)):
        folder = Path(prefix)
        if folder.parent.name == "envs":
            yield folder.parent.parent
        elif (folder / "conda-meta").is_dir():
            yield folder


def _variables_in(prefix: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables as they would be with that environment activated."""
    stale = _OF_THIS_INTERPRETER | _OF_AN_ENVIRONMENT
    found = {name: value for name, value in variables.items() if name not in stale}
    found["PATH"] = os.pathsep.join(filter(None, [str(prefix / "bin"), variables.get("PATH", os.defpath)]))
    if (prefix / "conda-meta").is_dir():
        found |= {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": prefix.name}
    else:
        found["VIRTUAL_ENV"] = str(prefix)
    return found
