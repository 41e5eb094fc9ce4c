"""HTTP GET with Tornado's client, for `prometheus` and for RabbitMQ in `brokers`."""

from __future__ import annotations

from urllib.parse import urlsplit

from tornado.httpclient import AsyncHTTPClient, HTTPError
from tornado.simple_httpclient import SimpleAsyncHTTPClient

#: Largest response body. The result of a query for one value has some hundred bytes.
MOST_BYTES = 1 << 20


class HTTPFetcher:
    """Gets URLs. Create and close it on the event loop that uses it."""

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        # Not the process-wide client: other code may configure it, and it outlives this object.
        self._client: AsyncHTTPClient = SimpleAsyncHTTPClient(force_instance=True, max_body_size=MOST_BYTES)

    async def __call__(self, url: str, login: tuple[str, str] | None = None) -> bytes:
        """Return the body of the response. The body of an error response is only returned if it is JSON.

        Parameters
        ----------
        login : tuple, optional
            A username and password. Redirects are then not followed, so that no other server receives them.

        Raises
        ------
        OSError
            The server did not answer, or answered with an error.
        """
        username, password = login or (None, None)
        try:
            found = await self._client.fetch(
                url,
                auth_username=username,
                auth_password=password,
                follow_redirects=login is None,
                raise_error=False,
                connect_timeout=self._timeout_s,
                request_timeout=self._timeout_s,
                headers={"Accept": "application/json"},
            )
        except (HTTPError, OSError) as error:
            # Neither the path nor a password in the URL is shown.
            server = urlsplit(url).netloc.rpartition("@")[2]
            raise OSError(f"{server} does not answer: {error}") from error
        is_json = "json" in found.headers.get("Content-Type", "")
        if found.code >= 300 and not is_json:
            raise OSError(f"HTTP {found.code}: {found.reason}")
        return found.body

    def close(self) -> None:
        """Close the client."""
        self._client.close()
