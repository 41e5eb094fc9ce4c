"""Refuses requests that browsers send to the scheduler's HTTP server on behalf of other sites.

A page of any site can make its visitor's browser send requests to the scheduler, which has no authentication:

1. The page names the scheduler in the request. The browser then names the page's site in ``Origin``, and
reports another site in ``Sec-Fetch-Site``.
2. After the page was loaded, its own name gets the scheduler's address (DNS rebinding). The browser considers
the scheduler the same site, but ``Host`` has the page's name.

So ``Host`` must be the scheduler's address, or a name that no other site can have.

A reverse proxy may put another name into ``Host``. In that case, ``Origin`` differs from ``Host`` even for
the scheduler's own page. Only ``Sec-Fetch-Site: same-origin``, which a page cannot forge, distinguishes the
two. The name in ``Origin`` must then be one of the scheduler's own, because DNS rebinding may give the
proxy's address to any other name.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from typing import Any
from urllib.parse import SplitResult, urlsplit

from distributed import Scheduler
from distributed.comm import get_address_host
from tornado.httputil import HTTPServerRequest

from daskserve.common import settings

logger = logging.getLogger("daskserve.supervisor")

#: Suffixes of names that cannot be registered: of one machine, of a local network, and of Kubernetes.
_PRIVATE_ENDS = (".localhost", ".local", ".internal", ".home.arpa", ".svc")
#: The causes of refusals.
SITE, HOST, BODY = "site", "host", "body"


class SiteGuard:
    """Refuses requests that browsers send on behalf of other sites; see the module.

    Attributes
    ----------
    refusals : dict
        The number of refused requests, by cause. Handlers count the requests whose body is too large.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler: Any = scheduler
        self.refusals = dict.fromkeys((SITE, HOST, BODY), 0)

    def refusal(self, request: HTTPServerRequest) -> str | None:
        """Return why a request is refused; None if it is allowed."""
        if is_of_another_site(request) and not self._is_of_own_page(request):
            origin = request.headers.get("Origin")
            cause = SITE
            text = (
                "Requests of pages of other sites are refused; this one comes from "
                f"{origin or 'another site'!r} and is for {request.host!r}. If there is a reverse proxy in "
                "between, configure it to pass on the header Host."
            )
        elif not self._is_own(request.host_name):
            cause = HOST
            text = (
                f"The host {request.host_name!r} may be a name that another site gives to this address. If "
                "it is the scheduler's, add it to daskserve.scheduler.allowed-hosts in the scheduler's Dask "
                "configuration."
            )
        else:
            return None
        self.refusals[cause] += 1
        logger.info("Refused a request of %s for %s: %s", request.remote_ip, request.path, text)
        return text

    def _is_of_own_page(self, request: HTTPServerRequest) -> bool:
        """Return whether the scheduler's page sent a request, and a reverse proxy has changed its host."""
        if request.headers.get("Sec-Fetch-Site") != "same-origin":
            return False
        origin = _parsed(request.headers.get("Origin", ""))
        return origin is not None and bool(origin.hostname) and self._is_own(str(origin.hostname))

    def _is_own(self, name: str) -> bool:
        name = plain_name(name)
        if is_unregistrable(name):
            return True
        own = (socket.gethostname(), get_address_host(self._scheduler.address))
        return name in map(plain_name, (*own, *settings.scheduler().allowed_hosts))


def is_of_another_site(request: HTTPServerRequest) -> bool:
    """Return whether a browser sent a request for a page of another site."""
    if request.headers.get("Sec-Fetch-Site") == "cross-site":
        return True
    if "Origin" not in request.headers:
        return False
    origin = _parsed(request.headers["Origin"])
    return origin is None or origin.netloc.lower() != request.host.lower()


def _parsed(origin: str) -> SplitResult | None:
    """Return the parts of an origin; None if the string is not an origin."""
    try:
        return urlsplit(origin)
    except ValueError:
        return None


def is_unregistrable(name: str) -> bool:
    """Return whether this host name cannot belong to a public website: an IP address or a private name."""
    if "." not in name or name.endswith(_PRIVATE_ENDS):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def plain_name(name: str) -> str:
    """Return a host in the form in which hosts are compared: lower case, no brackets, no trailing dot."""
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")
