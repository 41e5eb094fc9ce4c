"""The TLS context of a proxy, from the certificate and key on its host."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from daskserve.errors import BadRequestError


def server_context(
    certfile: str | None, keyfile: str | None = None, password: str | None = None
) -> ssl.SSLContext | None:
    """Return the TLS context of a server; None without a certificate.

    Raises
    ------
    BadRequestError
        A file is missing, or the files are not a certificate and its key. The message names the host.
    """
    if certfile is None:
        return None
    for option, name in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        if name is not None:
            _check_readable(option, name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask for one at the terminal.
        context.load_cert_chain(certfile, keyfile, password or "")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        secret = "ssl_keyfile_password does not open it" if password else "it may need ssl_keyfile_password"
        raise BadRequestError(
            f"{certfile!r} and {keyfile or certfile!r} on {socket.gethostname()} are not a certificate and "
            f"its key in PEM ({error}); if the key is encrypted, {secret}."
        ) from error
    return context


def _check_readable(option: str, name: str) -> None:
    try:
        with Path(name).open("rb"):
            pass
    except OSError as error:
        raise BadRequestError(
            f"{option}={name!r} cannot be read on {socket.gethostname()}, where the proxy runs: "
            f"{error.strerror}. Give an absolute path that exists on every host with a proxy."
        ) from error
