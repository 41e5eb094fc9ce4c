"""The places of values that a call refers to without sending them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from daskserve.common.types import WorkerAddress


@dataclass(frozen=True, slots=True)
class ValuePlaces:
    """The places of the values of one call.

    Attributes
    ----------
    nbytes : Mapping
        How many bytes of the values each worker holds.
    total : int
        The total size of the values, each counted once.
    """

    nbytes: Mapping[WorkerAddress, int]
    total: int
