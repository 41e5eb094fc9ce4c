"""The certificates that a scheduler or a worker uses where it is somebody's client."""

from __future__ import annotations

import copy
from typing import Any, Literal


def as_client(security: Any, role: Literal["scheduler", "worker"]) -> Any:
    """Return the security of a server for a Dask client of its own.

    ``dask scheduler --tls-cert`` and ``dask worker --tls-cert`` set the certificate of their own role and no
    other. It serves for the client's as well, which Dask itself never needs there.

    Parameters
    ----------
    security : distributed.Security
        The server's.
    role : str
        What the server is.
    """
    # Those of other packages have ways of their own to certificates.
    if getattr(security, "tls_client_cert", "") is not None:
        return security
    own = copy.copy(security)
    own.tls_client_cert = getattr(security, f"tls_{role}_cert")
    own.tls_client_key = getattr(security, f"tls_{role}_key")
    return own
