"""Panels about instances in Dask's own dashboard; bokeh is imported only where that has imported it."""
