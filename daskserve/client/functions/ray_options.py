"""Options of Ray Serve that have no counterpart: refused, or ignored with a warning if harmless."""

from __future__ import annotations

from typing import Any

from daskserve.client.warning import warn_caller
from daskserve.config_file import ray_keys
from daskserve.options.fields.ray_names import INSTEAD


def check_ray_options(function: str, **given: Any) -> None:
    """Raise `TypeError` for an option that is set and would change behaviour; log a warning for others.

    Parameters
    ----------
    function : str
        The function that got the options, for messages.
    """
    for name, value in given.items():
        if value is None:
            continue
        text = f"{name} of {function} is Ray Serve's name: {INSTEAD[name]}."
        if not ray_keys.INSTANCE[name].is_harmless(value):
            raise TypeError(text)
        warn_caller(text)
