"""The certificates that a scheduler or a worker uses when it connects as a client."""

from __future__ import annotations

import copy
from typing import Any, Literal


def as_client(security: Any, role: Literal["scheduler", "worker"]) -> Any:
    """Return the security for a Dask client inside a server.

    ``dask scheduler --tls-cert`` and ``dask worker --tls-cert`` set only the certificate of the server's
    role. This function also uses it as the client certificate, which Dask itself never needs there.

    Parameters
    ----------
    security : distributed.Security
        The server's security.
    role : str
        The server's role.
    """
    # Security classes of other packages may provide certificates in another way.
    if getattr(security, "tls_client_cert", "") is not None:
        return security
    own = copy.copy(security)
    own.tls_client_cert = getattr(security, f"tls_{role}_cert")
    own.tls_client_key = getattr(security, f"tls_{role}_key")
    return own
