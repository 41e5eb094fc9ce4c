"""Packages for a replica: a virtual environment on this machine, installed once and kept.

The environment is a layer over that of the worker: packages of the layer take precedence over the worker's.
The name of its folder is a digest of the packages and the Python version, so replicas with the same packages
share it. Processes of this machine install one after another, by a file lock, and a mark in the folder shows
that an installation is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from daskserve.common import settings
from daskserve.data.replica.environment.kept_folders import delete_unused, mark_used
from daskserve.errors import ReplicaStartError
from daskserve.options.environment import Interpreter

#: The file in the folder of an environment that shows that its packages are installed.
MARK = "daskserve-complete"
#: Number of lines of an installer's output that an error shows.
SHOWN_LINES = 15


def find_installer(variables: Mapping[str, str]) -> str | None:
    """Return the path of uv if it is installed here; None otherwise, in which case pip is used."""
    return shutil.which("uv", path=variables.get("PATH", os.defpath)) or (
        # Installed as a package of the worker's environment.
        shutil.which("uv", path=os.path.join(sys.prefix, "bin"))
    )


def folder_of(packages: Sequence[str], root: Path) -> Path:
    """Return the folder of the environment that adds these packages to those of this process's Python."""
    what = json.dumps([sys.prefix, sys.version, sorted(packages)])
    return root / hashlib.sha256(what.encode()).hexdigest()[:20]


def install(packages: Sequence[str], root: Path, variables: Mapping[str, str]) -> Interpreter:
    """Return the interpreter of an environment with these packages; install it if it does not exist.

    This blocks, for as long as an installation takes. It may run in several processes at once.

    Parameters
    ----------
    packages : sequence of str
        Requirements, as pip reads them.
    root : Path
        The folder that contains these environments.
    variables : mapping
        This process's environment variables, which configure the installer.

    Raises
    ------
    ReplicaStartError The packages cannot be installed; the error shows the end of the installer's output.
    """
    folder = folder_of(packages, root)
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(root / f"{folder.name}.lock", "w", opener=_for_this_user) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / MARK).exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted installation
            folder.mkdir(0o700)
            _create(folder)
            # The installer inherits the lock, because it may outlive this process.
            _run(_command(folder, packages, find_installer(variables)), variables, lock.fileno(), packages)
            (folder / MARK).touch()
            mark_used(folder)
            delete_unused(folder, settings.process().environments_days)
        mark_used(folder)
    inherited = {name: value for name, value in variables.items() if name != "PYTHONHOME"}
    path = os.pathsep.join([str(folder / "bin"), variables.get("PATH", os.defpath)])
    return Interpreter(
        str(folder / "bin" / "python"),
        str(folder),
        is_own=False,
        variables={**inherited, "PATH": path, "VIRTUAL_ENV": str(folder)},
        first=tuple(_beside_packages()),
    )


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _create(folder: Path) -> None:
    """Create an environment that also finds the packages of this process's environment."""
    has_pip = importlib.util.find_spec("pip") is not None
    venv.EnvBuilder(symlinks=True, with_pip=not has_pip).create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    layers = "".join(f"import site; site.addsitedir({each!r})\n" for each in _package_folders())
    (folder / "lib" / version / "site-packages" / "daskserve-worker.pth").write_text(layers)


def _package_folders() -> list[str]:
    """Return the folders in which this process's environment has its packages."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    return [each for each in dict.fromkeys(folders) if each in sys.path]


def _beside_packages() -> list[str]:
    """Return the folders that this process imports from, except the standard library and packages."""
    base = tuple({os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.prefix)})
    found = [entry or os.getcwd() for entry in sys.path]
    return [each for each in found if os.path.isdir(each) and not os.path.realpath(each).startswith(base)]


def _command(folder: Path, packages: Sequence[str], uv: str | None) -> list[str]:
    python = str(folder / "bin" / "python")
    if uv is not None:
        return [uv, "pip", "install", "--quiet", "--python", python, *packages]
    how = ["--quiet", "--disable-pip-version-check", "--no-input"]
    return [python, "-m", "pip", "install", *how, *packages]


def _run(command: list[str], variables: Mapping[str, str], lock: int, packages: Sequence[str]) -> None:
    done = subprocess.run(
        command,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
        text=True,
        check=False,
    )
    if done.returncode:
        shown = "\n".join(done.stdout.strip().splitlines()[-SHOWN_LINES:])
        raise ReplicaStartError(
            f"The packages {list(packages)} cannot be installed on {os.uname().nodename}: "
            f"{Path(command[0]).name} exited with status {done.returncode}.\n{shown}"
        )
