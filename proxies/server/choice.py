"""The servers by their names in ``http_options``."""

from __future__ import annotations

from daskserve.errors import BadRequestError
from daskserve.proxies.server.life import HTTPServer
from daskserve.proxies.server.tornado import TornadoServer


def server_type(name: str) -> type[HTTPServer]:
    """Return the class of a server.

    Raises
    ------
    BadRequestError
        The server is not installed.
    """
    if name == "tornado":
        return TornadoServer
    try:
        # Imported here because uvicorn is an extra.
        from daskserve.proxies.server.uvicorn import UvicornServer
    except ImportError as error:
        raise BadRequestError(
            f'http_options={{"server": "uvicorn"}} needs uvicorn and httptools on each worker with a proxy '
            f"({error}). Install them there with: pip install 'daskserve[uvicorn]'"
        ) from error
    return UvicornServer
