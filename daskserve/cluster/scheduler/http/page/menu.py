"""The link to the page in the menu of Dask's dashboard.

Dask has no setting for it. The menu is the list ``pages`` among the variables of the dashboard's templates.
If another version of Dask keeps it elsewhere, only the link is missing.
"""

from __future__ import annotations

from distributed import Scheduler

from daskserve.cluster.scheduler.http.dashboard import template_variables


def add_to_menu(scheduler: Scheduler, name: str) -> None:
    """Add a page to the menu; idempotent, and does nothing without a dashboard."""
    pages = _pages(scheduler)
    if name not in pages:
        pages.append(name)


def remove_from_menu(scheduler: Scheduler, name: str) -> None:
    """Remove a page from the menu; idempotent."""
    pages = _pages(scheduler)
    if name in pages:
        pages.remove(name)


def _pages(scheduler: Scheduler) -> list[str]:
    pages = (template_variables(scheduler) or {}).get("pages")
    return pages if isinstance(pages, list) else []
