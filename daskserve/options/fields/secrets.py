"""Secrets in options: references, which are read where the secret is used, and masks for output.

A reference is ``{"env": "NAME"}``, a variable in the environment of the process that uses the secret, or
``{"file": "/path"}``, a file on its machine, as Kubernetes and Docker mount secrets. Records, start messages
and configuration then hold only the reference. It is a mapping because any string may be a password.

This module does not import pydantic, because proxies do not.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from daskserve.common.formatting import shown
from daskserve.errors import BadRequestError

#: A secret, or a reference to one.
SecretOption = str | Mapping[str, str]

#: The replacement of a secret.
HIDDEN = "***"
MAX_BYTES = 64 << 10

#: A password may contain an unescaped @, and the scheme may be missing, so everything up to the last @ before
#: the path is hidden. A match begins only where a word begins, so that long texts are read once.
_LOGIN = re.compile(r"(?:(?<=://)[^/?#\s]*|(?<![^\s/?#:@'\"])[^\s/?#:@'\"]+:[^\s/?#'\"]+)@")
#: Names of values that are not shown, such as those in ``policy_kwargs`` or a ``user_config``; names such as
#: ``max_tokens`` are excluded.
_SECRET = re.compile(r"passw|passphrase|secret|token|credential|authorization|(?:api|private)_?key", re.I)
_COUNT = re.compile(r"tokens$", re.I)
_PARAMETER = re.compile(r"(?<=[?&])((?:user(?:name)?|pass(?:word|wd)?)=)[^&#\s'\"]*", re.IGNORECASE)


def is_reference(value: Any) -> bool:
    """Return whether a value is a reference to a secret."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return False
    ((kind, name),) = value.items()
    return kind in ("env", "file") and isinstance(name, str)


def checked_secret(value: Any) -> Any:
    """Return a secret or a reference to one; raise `ValueError` otherwise, without showing the value."""
    if isinstance(value, str) or value is None:
        return value
    if not is_reference(value):
        raise ValueError(
            'it is neither a string nor a reference to a secret; give {"env": "NAME"} for an environment '
            'variable, or {"file": "/path"} for a file, both of the process that uses the secret'
        )
    ((kind, name),) = value.items()
    if not name or (kind == "file" and not os.path.isabs(name)):
        form = "the absolute path of a file" if kind == "file" else "the name of an environment variable"
        raise ValueError(f"the reference {dict(value)!r} does not have {form}")
    return dict(value)


def read_secret(value: SecretOption, what: str, variables: Mapping[str, str]) -> str:
    """Return the secret that an option contains or refers to. This may read a file.

    Parameters
    ----------
    what : str
        Names the option in errors.
    variables : mapping
        This process's environment variables.

    Raises
    ------
    BadRequestError
        There is no such variable or file here. The message names it, and shows no secret.
    """
    if isinstance(value, str):
        return value
    reference = dict(value)
    where = f"on {socket.gethostname()}, where it is used"
    if "env" in reference:
        found = variables.get(reference["env"])
        if found is None:
            raise BadRequestError(
                f"{what} is {reference}, but there is no such environment variable in the process {where}; "
                "set it for that process, or refer to a file."
            )
    else:
        found = _read(reference["file"], what, where)
    if not found:
        raise BadRequestError(f"{what} is {reference}, which is empty {where}.")
    return found


def _read(path: str, what: str, where: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {shown(MAX_BYTES >> 10)} KiB")
        # Editors and echo end a file with a newline, which is not part of a password.
        return data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        problem = "it is not UTF-8 text"  # the error would quote it
    except OSError as error:
        problem = str(error.strerror)
    except ValueError as error:
        problem = str(error)
    raise BadRequestError(
        f"{what} is {{'file': {path!r}}}, which cannot be read {where}: {problem}. Put the secret into "
        "that file, and give the user of that process read access."
    )


def hidden(value: Any) -> Any:
    """Return a reference to a secret unchanged, and hide everything else, for `repr` and errors."""
    return value if value is None or is_reference(value) else HIDDEN


def each_hidden(values: Any) -> Any:
    """Return secrets by name, masked."""
    return {name: hidden(each) for name, each in values.items()} if isinstance(values, Mapping) else HIDDEN


def without_secrets(name: str, value: Any) -> Any:
    """Return a plain value without the parts whose names, or the names around them, suggest a secret.

    Credentials in URLs are also masked.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(f"{name}.{key}", each) for key, each in value.items()}
    is_count = isinstance(value, int | float) and _COUNT.search(name) is not None
    return HIDDEN if value and _SECRET.search(name) and not is_count else masked(value)


def masked(value: Any) -> Any:
    """Return a copy of plain values in which the credentials of all URLs are masked."""
    if isinstance(value, str):
        without_login = _LOGIN.sub(f"{HIDDEN}@", value) if "@" in value else value
        return _PARAMETER.sub(rf"\1{HIDDEN}", without_login)
    if isinstance(value, Mapping):
        return {masked(key): masked(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(each) for each in value]
    return value
