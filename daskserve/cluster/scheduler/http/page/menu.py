"""The link to the page in the menu of Dask's dashboard.

Dask has no setting for it. All pages of a scheduler's dashboard are rendered with one dictionary, whose list
``pages`` is the menu. If another version of Dask keeps it elsewhere, only the link is missing.
"""

from __future__ import annotations

import sys
from typing import Any

from distributed import Scheduler

#: The module of the dashboard, which is imported if bokeh is installed and the dashboard is wanted.
_DASHBOARD = "distributed.dashboard.scheduler"


def add_to_menu(scheduler: Scheduler, name: str) -> None:
    """Add a page to the menu; idempotent, and does nothing without a dashboard."""
    pages = _pages(scheduler)
    if pages is not None and name not in pages:
        pages.append(name)


def remove_from_menu(scheduler: Scheduler, name: str) -> None:
    """Remove a page from the menu; idempotent."""
    pages = _pages(scheduler)
    if pages is not None and name in pages:
        pages.remove(name)


def _pages(scheduler: Scheduler) -> list[str] | None:
    dashboard: Any = sys.modules.get(_DASHBOARD)
    application = getattr(scheduler, "http_application", None)
    # For a scheduler without a dashboard, the lookup would create a dictionary that is never freed.
    if dashboard is None or not getattr(application, "applications", None):
        return None
    variables = getattr(dashboard, "template_variables", None)
    pages = None if variables is None else variables(scheduler).get("pages")
    return pages if isinstance(pages, list) else None
