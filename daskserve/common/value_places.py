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
        How many bytes of them each worker holds.
    total : int
        How many bytes they are, each value counted once.
    """

    nbytes: Mapping[WorkerAddress, int]
    total: int
