"""Panels about instances in Dask's own dashboard; bokeh is imported only if the dashboard has imported it."""
