"""Other names of what is in `tables`."""

from tables import case
from tables import each_case as for_each

__all__ = ["case", "for_each"]
