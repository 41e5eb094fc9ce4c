"""What all option models share.

A pydantic field and its description are the only definition of an option: the API, the documentation and the
errors come from it. Defaults that an operator may want to change for a whole site are read from Dask's own
configuration (`daskserve.common.settings`). Pydantic stays off the request path.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_wrap_validator_function

from daskserve.errors import WrongTypeError
from daskserve.options.unknown import check_spellings, explained, has_wrong_type, wrong_type

#: Marks a field that replicas do not read, as ``Annotated[int, CONTROLLER_ONLY]``.
CONTROLLER_ONLY: Final = "read by the controller only"
#: Marks a field that is fixed for the life of a replica: a change of it replaces the replicas.
REPLACES: Final = "a change replaces the replicas"


@dataclass(frozen=True, slots=True)
class Masked:
    """Marks a field with secrets, as ``Annotated[..., Masked(hidden)]``.

    Attributes
    ----------
    show : callable
        Returns what `repr` and errors show of a value.
    """

    show: Callable[[Any], Any]


def as_bytes(value: Any) -> Any:
    """Return a text such as ``"2GB"``, as Dask reads it, as a number of bytes; all else as it is."""
    if not isinstance(value, str):
        return value
    from dask.utils import parse_bytes  # takes 0.1 s, and child processes do not need it

    try:
        if not value.strip()[:1].isdigit():
            raise ValueError  # Dask reads "GB" as one GB
        return parse_bytes(value)
    except (ValueError, OverflowError):
        raise wrong_type(
            f"{value!r} is not an amount of bytes; give a number, or a text such as '2GB' or '512MiB'"
        ) from None


def _as_number(value: Any) -> Any:
    if isinstance(value, (str, bytes, bool)):
        raise wrong_type(f"{value!r} is not a number")
    return value


#: The type of an option that is a number of bytes.
ByteCount = Annotated[int, BeforeValidator(as_bytes)]
#: The type of an option that is an amount of a resource: no text, and no truth value.
Amount = Annotated[float, BeforeValidator(_as_number)]


class Effect(enum.StrEnum):
    """What a change of an option does to running replicas."""

    AT_ONCE = "acts at once"
    TOLD = "reconfigures replicas"
    REPLACES = "replaces replicas"


def effect_of(field: FieldInfo) -> Effect:
    """Return what a change of an option of a backend does to its running replicas."""
    if REPLACES in field.metadata:
        return Effect.REPLACES
    return Effect.AT_ONCE if CONTROLLER_ONLY in field.metadata else Effect.TOLD


class Options(BaseModel):
    """Base class of all option models: unknown keys and invalid assignments are errors."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, populate_by_name=True)
    #: The argument that takes these options, for errors; empty if users do not set them.
    place: ClassVar[str] = ""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Not a model validator: those of derived classes would be outside of it.
        return no_info_wrap_validator_function(cls._with_explained_errors, handler(source))

    @classmethod
    def _with_explained_errors(cls, values: Any, validate: Any) -> Any:
        if isinstance(values, Mapping):
            check_spellings(cls, values)
        try:
            return validate(values)
        except ValidationError as error:
            others = [each for each in Options.__subclasses__() if each is not cls and each.place]
            places = [(name, each.place) for each in others for name in each.model_fields]
            raise explained(error, cls, places, cls._masked_field()) from None

    @classmethod
    def _masked_field(cls) -> dict[str, Callable[[Any], Any]]:
        """Return what is shown of the values of options with secrets, by the option's name."""
        return {
            name: each.show
            for name, field in cls.model_fields.items()
            for each in field.metadata
            if isinstance(each, Masked)
        }

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        masked_field = self._masked_field()
        for name, value in super().__repr_args__():
            yield name, masked_field[name](value) if name in masked_field else value

    def to_plain(self) -> dict[str, Any]:
        """Return the options that were set, as plain values from which the model can be restored."""
        return self.model_dump(exclude_unset=True)


ModelT = TypeVar("ModelT", bound=Options)


def parse_options(model: type[ModelT], value: Any, *, what: str) -> ModelT:
    """Return ``value`` as an option model.

    Parameters
    ----------
    model
        The class of the option model.
    value : model, mapping or None
        None means all defaults.
    what : str
        Names the argument in errors.

    Raises
    ------
    TypeError
        The value is neither the model nor a mapping.
    pydantic.ValidationError
        A `ValueError` that names the option and what is wrong with it.
    """
    if value is None:
        return model()
    if isinstance(value, model):
        return value
    if isinstance(value, Mapping):
        return model(**value)
    raise TypeError(
        f"{what} must be a {model.__name__} or a dict of its options, got {type(value).__name__}: {value!r}"
    )


def parse_typed(model: type[ModelT], value: Any, *, what: str) -> ModelT:
    """Return ``value`` as an option model, as `parse_options`; a value of a wrong type is a `TypeError`.

    Raises
    ------
    TypeError
        The value is neither the model nor a mapping, or has an option of a wrong type: a `WrongTypeError`.
    pydantic.ValidationError
        A `ValueError` that names the option and what is wrong with it.
    """
    try:
        return parse_options(model, value, what=what)
    except ValidationError as error:
        if not has_wrong_type(error):
            raise
        raise WrongTypeError(str(error)) from None
