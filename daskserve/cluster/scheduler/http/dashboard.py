"""Dask's dashboard on a scheduler."""

from __future__ import annotations

import sys
from typing import Any

from distributed import Scheduler

#: The module of the dashboard, which is imported if bokeh is installed and the dashboard is enabled.
_DASHBOARD = "distributed.dashboard.scheduler"


def template_variables(scheduler: Scheduler) -> dict[str, Any] | None:
    """Return the variables with which all pages of a dashboard are rendered; None without a dashboard."""
    dashboard: Any = sys.modules.get(_DASHBOARD)
    application = getattr(scheduler, "http_application", None)
    # For a scheduler without a dashboard, the lookup would create a dictionary that is never freed.
    if dashboard is None or not getattr(application, "applications", None):
        return None
    variables = getattr(dashboard, "template_variables", None)
    return None if variables is None else variables(scheduler)
