"""Finds the address of a scheduler from that of its HTTP server, such as ``http://host:8787``."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from daskserve.errors import ClusterUnreachableError

#: Path at which Dask's HTTP server describes its scheduler.
_IDENTITY = "/json/identity.json"
#: How much of an answer is read: about a kilobyte per worker.
_READ_BYTES = 64 << 20


def is_http(address: str) -> bool:
    """Return whether an address is that of an HTTP server."""
    return address.startswith(("http://", "https://"))


def scheduler_behind(url: str, timeout_s: float) -> str:
    """Return the address of a scheduler, given the URL of its HTTP server or of a page there.

    Raises
    ------
    ClusterUnreachableError
        No Dask scheduler's HTTP server answers there.
    """
    parts = urlsplit(url)
    segments = [each for each in parts.path.split("/") if each]
    # The server may have a path prefix, and the URL may be that of a page, such as /status.
    for count in range(len(segments), -1, -1):
        path = "".join(f"/{each}" for each in segments[:count])
        problem = "it is not the HTTP server of a scheduler"
        try:
            found = _identity(f"{parts.scheme}://{parts.netloc}{path}{_IDENTITY}", timeout_s)
            if found is not None:
                return found
        except urllib.error.HTTPError as error:
            error.close()
            problem = f"it answers with {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            problem = str(getattr(error, "reason", error)) or repr(error)
            break
        except ValueError:
            pass  # no JSON, such as a login page
    raise ClusterUnreachableError(
        f"No Dask scheduler answers at {url!r} ({problem}); pass the address of a running scheduler, such "
        "as tcp://host:8786, or of its HTTP server, such as http://host:8787."
    )


def _identity(url: str, timeout_s: float) -> str | None:
    """Return the address that a scheduler reports for itself; None if the server is not a scheduler."""
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        found = json.loads(answer.read(_READ_BYTES))
    is_scheduler = isinstance(found, dict) and found.get("type") == "Scheduler"
    return str(found["address"]) if is_scheduler and "address" in found else None
