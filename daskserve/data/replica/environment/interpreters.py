"""Finds the interpreter of a backend's environment on this machine.

This runs on the replica's machine, because environments differ between machines. It reads conda's folders
itself, because running ``conda`` takes a second.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from daskserve.common import settings
from daskserve.data.replica.environment.packages import install
from daskserve.errors import BadRequestError
from daskserve.loops.threads import in_daemon
from daskserve.options.environment import Environment, Interpreter
from daskserve.options.fields.secrets import read_secret

#: Names of the root environment of a conda installation.
_BASE_NAMES = frozenset({"base", "root"})
#: Variables that would make another interpreter import this interpreter's modules.
_OF_THIS_INTERPRETER = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONEXECUTABLE", "__PYVENV_LAUNCHER__"})
_OF_AN_ENVIRONMENT = frozenset({"VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"})


async def interpreter_of(text: str | None, variables: Mapping[str, str]) -> Interpreter:
    """Return the interpreter of an environment, with its variables; install its packages if needed.

    Parameters
    ----------
    text : str or None
        The result of `daskserve.options.environment.Environment.to_text`.
    variables : mapping
        This process's environment variables.

    Raises
    ------
    BadRequestError
        There is no such environment here, and the message lists the places searched. Or a variable refers
        to a secret that does not exist.
    ReplicaStartError
        Its packages cannot be installed.
    """
    if text is None:
        return find_interpreter(None, variables)
    environment = Environment.from_text(text)
    if environment.packages:
        root = settings.process().environments
        # Not in a thread of the worker's pool, because an abandoned start may leave the thread waiting.
        found = await in_daemon("daskserve-install", lambda _: install(environment.packages, root, variables))
    else:
        found = find_interpreter(environment.python, variables)
    if not environment.env_vars:
        return found
    given = await asyncio.to_thread(_read_variables, environment, variables)
    base = variables if found.variables is None else found.variables
    return replace(found, variables={**base, **given})


def _read_variables(environment: Environment, variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: read_secret(value, f"env_vars[{name!r}]", variables)
        for name, value in environment.env_vars.items()
    }


def find_interpreter(environment: str | None, variables: Mapping[str, str]) -> Interpreter:
    """Return the interpreter of a Python environment on this machine; by default, of this process.

    Parameters
    ----------
    environment : str or None
        The name of a conda environment, or the path of a folder.
    variables : mapping
        This process's environment variables.

    Raises
    ------
    BadRequestError
        There is no such environment here; the message lists the places searched.
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
            "Create it on every worker that may run the backend, or limit the backend to those that have it "
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
        f"There is no conda environment {name!r} on {os.uname().nodename}; searched: {looked}. Create it on "
        "every worker that may run the backend (conda create -n ...), or pass env='/path/to/environment'."
    )


def _conda_candidates(name: str, variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield the possible folders of an environment with a name, in conda's order."""
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
    # A worker may run in an environment of the installation that was not activated.
    for prefix in filter(None, (variables.get("CONDA_PREFIX"), sys.prefix)):
        folder = Path(prefix)
        if folder.parent.name == "envs":
            yield folder.parent.parent
        elif (folder / "conda-meta").is_dir():
            yield folder


def _variables_in(prefix: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a process in which an environment is activated."""
    stale = _OF_THIS_INTERPRETER | _OF_AN_ENVIRONMENT
    found = {name: value for name, value in variables.items() if name not in stale}
    found["PATH"] = os.pathsep.join(filter(None, [str(prefix / "bin"), variables.get("PATH", os.defpath)]))
    if (prefix / "conda-meta").is_dir():
        found |= {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": prefix.name}
    else:
        found["VIRTUAL_ENV"] = str(prefix)
    return found
