"""Arguments of calls without some of their values, which are sent separately and inserted by the replica."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from daskserve.common.types import Payload
from daskserve.payload.pickling import dump_in, dump_with, with_places


class ValueSource(enum.StrEnum):
    """The place of a value that was taken out of a call's arguments."""

    #: On the Dask cluster, by its key.
    DASK = "dask"
    #: Among the buffers of the call itself.
    HERE = "here"
    #: In the process of the actor that made it.
    KEPT = "kept"


def take_out(arguments: Any, is_taken: Callable[[Any], bool]) -> tuple[Payload, list[Any]]:
    """Pickle arguments without the values for which ``is_taken`` returns True; return both."""
    # imported on use, as in `daskserve.payload.pickling`
    from daskserve.internals.cloudpickle import SeparatingPickler

    def take_once(places: Mapping[int, Any]) -> tuple[Payload, list[Any]]:
        values: list[Any] = []
        dumps = partial(dump_in, partial(SeparatingPickler, is_taken=is_taken, values=values), places=places)
        return dump_with(dumps, arguments), values

    return with_places(take_once, arguments)


class _FillingUnpickler(pickle.Unpickler):
    values: list[Any]

    def persistent_load(self, number: Any) -> Any:
        value = self.values[number]
        if isinstance(value, Payload):
            # Unpickled here, because that may run user code; and only once, because the arguments may refer
            # to it twice.
            value = self.values[number] = value.load()
        return value


@dataclass(slots=True)
class FilledPayload(Payload):
    """The arguments of a call, and the values that `take_out` removed; a value may still be pickled."""

    values: Sequence[Any] = ()

    def load(self) -> Any:
        unpickler = _FillingUnpickler(io.BytesIO(self.data), buffers=self.guarded_buffers())
        unpickler.values = list(self.values)
        return unpickler.load()
