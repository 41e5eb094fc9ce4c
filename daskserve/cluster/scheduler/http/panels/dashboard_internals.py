"""The undocumented parts of Dask's dashboard that the panels use. Importing this imports bokeh."""

from __future__ import annotations

from daskserve.internals.checking import needs

with needs("distributed", ">=2025.1,<2026.9") as check:
    from distributed.dashboard import components
    from distributed.dashboard.components import scheduler as scheduler_components
    from distributed.dashboard.utils import update as update_source

    check.attributes(components, "add_periodic_callback")
    check.attributes(scheduler_components, "BOKEH_THEME", "env")

#: Calls ``update`` of a component of a document regularly: ``(document, component, interval_ms)``.
add_periodic_callback = components.add_periodic_callback
#: The theme and the templates of the dashboard's pages.
THEME, TEMPLATES = scheduler_components.BOKEH_THEME, scheduler_components.env

__all__ = ["TEMPLATES", "THEME", "add_periodic_callback", "update_source"]
