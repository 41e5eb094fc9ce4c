"""The start messages of controllers in tests."""

from __future__ import annotations

from daskserve.common.types import Location
from daskserve.options.http import HTTPOptions
from daskserve.options.start_messages import ControllerStart


def controller_start(location: Location = Location.NO_SERVER, start_id: str = "") -> ControllerStart:
    """Return the start message of a controller with default options."""
    return ControllerStart(
        tracing={},
        http=HTTPOptions(location=location),
        middlewares=None,
        callback=None,
        start_id=start_id,
        opens_with_route=False,
        history_bytes=1 << 20,
        logging=None,
    )
