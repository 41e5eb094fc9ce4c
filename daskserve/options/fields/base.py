"""The base class of all option models, and their errors.

A pydantic field and its description are the only definition of an option: the API, the documentation and the
errors come from it. Defaults that an operator may want to change for a whole site are read from Dask's own
configuration (`daskserve.common.settings`). Pydantic stays off the request path.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_wrap_validator_function

from daskserve.errors import WrongTypeError
from daskserve.options.fields.ray_names import INSTEAD, TRANSLATED
from daskserve.options.fields.secrets import HIDDEN, checked_secret, masked

#: Number of valid options that the error lists.
NEAREST = 3
#: The type of errors about the name of an option, in addition to pydantic's own types.
OPTION_NAME = "option_name"
#: The type of an error about a value of a wrong type, in addition to pydantic's own types.
WRONG_TYPE = "wrong_type"
#: The whole numbers that records and messages can hold.
WHOLE_NUMBERS = range(-(2**63), 2**63)
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
        Returns the form of a value that `repr` and errors show.
    """

    show: Callable[[Any], Any]


def as_bytes(value: Any) -> Any:
    """Return the number of bytes in a string such as ``"2GB"``, parsed as by Dask; other values unchanged."""
    if not isinstance(value, str):
        return value
    from dask.utils import parse_bytes  # takes 0.1 s to import, and child processes do not need it

    try:
        if not value.strip()[:1].isdigit():
            raise ValueError  # because Dask reads "GB" as one GB
        return parse_bytes(value)
    except (ValueError, OverflowError):
        raise wrong_type(
            f"{value!r} is not an amount of bytes; give a number, or a text such as '2GB' or '512MiB'"
        ) from None


def _as_number(value: Any) -> Any:
    if isinstance(value, (str, bytes, bool)):
        raise wrong_type(f"{value!r} is not a number")
    return value


def _checked_folder(value: str) -> str:
    if "://" not in value and not value.startswith("/"):
        raise ValueError(
            f"{masked(value)!r} is a relative path, which may be a different folder on each worker; give an "
            "absolute path or a URL"
        )
    return value


#: The type of an option that is a folder: an absolute path on the workers, or a URL.
Folder = Annotated[str, AfterValidator(_checked_folder)]
#: The type of an option that is a number of bytes.
ByteCount = Annotated[
    int, BeforeValidator(as_bytes), WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}]})
]
#: The type of an option that holds a secret or a reference to one; see `daskserve.options.fields.secrets`.
Secret = Annotated[str | dict[str, str], BeforeValidator(checked_secret)]
#: The type of an option that is an amount of a resource: neither a string nor a bool.
Amount = Annotated[float, BeforeValidator(_as_number)]


class Effect(enum.StrEnum):
    """The effect of a change of an option on running replicas."""

    AT_ONCE = "acts at once"
    RECONFIGURES = "reconfigures replicas"
    REPLACES = "replaces replicas"


def effect_of(field: FieldInfo) -> Effect:
    """Return the effect of a change of a backend's option on its running replicas."""
    if REPLACES in field.metadata:
        return Effect.REPLACES
    return Effect.AT_ONCE if CONTROLLER_ONLY in field.metadata else Effect.RECONFIGURES


class Options(BaseModel):
    """Base class of all option models: unknown keys and invalid assignments are errors."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        populate_by_name=True,
        protected_namespaces=(),  # pydantic before 2.10 warns about each field that begins with "model_"
    )
    #: The name of the argument with these options, for errors; empty if users do not set them.
    place: ClassVar[str] = ""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Not a model validator, because validators of derived classes would run outside of it.
        schema = handler(source)
        if schema.get("function") == {"type": "no-info", "function": cls._with_explained_errors}:
            return schema  # the model is a field of another model
        return no_info_wrap_validator_function(cls._with_explained_errors, schema)

    @classmethod
    def _with_explained_errors(cls, values: Any, validate: Any) -> Any:
        if isinstance(values, Mapping):
            check_spellings(cls, values)
        try:
            options = validate(values)
            check_whole_numbers(cls, options)
            return options
        except ValidationError as error:
            others = [each for each in Options.__subclasses__() if each is not cls and each.place]
            places = [(name, each.place) for each in others for name in each.model_fields]
            raise explained(error, cls, places, cls._masked_field()) from None

    @classmethod
    def _masked_field(cls) -> dict[str, Callable[[Any], Any]]:
        """Return the masked values of options with secrets, by the option's name."""
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
        A `ValueError` that names the option and the problem.
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
    """Return ``value`` as an option model, like `parse_options`; a value of a wrong type is a `TypeError`.

    Raises
    ------
    TypeError
        The value is neither the model nor a mapping, or has an option of a wrong type: a `WrongTypeError`.
    pydantic.ValidationError
        A `ValueError` that names the option and the problem.
    """
    try:
        return parse_options(model, value, what=what)
    except ValidationError as error:
        if any(each["type"].endswith(("_type", "_parsing")) for each in error.errors()):
            raise WrongTypeError(str(error)) from None
        raise


# ---- the names of options


def describe_unknown(name: str, model: str, known: Collection[str], places: Iterable[tuple[str, str]]) -> str:
    """Return the message for an unknown option.

    Parameters
    ----------
    known : collection of str
        The names of the model's options.
    places : iterable of (str, str)
        The options of other models, each with the argument that takes them.
    """
    elsewhere = [place for option, place in places if option == name]
    if name in INSTEAD:
        return f"{model} has no option '{name}'. That is Ray Serve's name: {INSTEAD[name]}."
    if elsewhere:
        return f"{model} has no option '{name}'. It belongs in {' or '.join(elsewhere)}."
    similar = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean '{similar[0]}'?" if similar else ""
    nearest = ", ".join(difflib.get_close_matches(name, known, NEAREST, cutoff=0))
    return f"{model} has no option '{name}'.{hint} The nearest are: {nearest}; {model}.model_fields has all."


@cache
def spellings_of(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the other names under which a model's options may be given, each with the preferred one."""
    found: dict[str, str] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            found |= {str(each): name for each in field.validation_alias.choices if each != name}
    found |= {theirs: ours for theirs, ours in TRANSLATED.items() if ours in model.model_fields}
    return MappingProxyType(found)


@cache
def _all_spellings(model: type[BaseModel]) -> Mapping[str, str]:
    """Return all names under which a model's options may be given, each with the preferred one."""
    return MappingProxyType({**{each: each for each in model.model_fields}, **spellings_of(model)})


def names_of(model: type[BaseModel]) -> list[str]:
    """Return the names under which a model's options may be given, the preferred ones first."""
    return [*model.model_fields, *spellings_of(model)]


def check_spellings(model: type[BaseModel], values: Mapping[str, Any]) -> None:
    """Raise `ValidationError` if an option is given under two of its names."""
    given: dict[str, str] = {}
    twice = []
    known = _all_spellings(model)
    if len(names := [known[each] for each in values if each in known]) == len(set(names)):
        return  # the usual case
    for spelling, name in known.items():
        if spelling in values and (first := given.setdefault(name, spelling)) != spelling:
            text = f"{spelling} is another spelling of {first}; give only one of them"
            found = {
                "type": OPTION_NAME,
                "loc": (spelling,),
                "input": [first, spelling],
                "ctx": {"text": text},
            }
            twice.append(as_details(found))
    if twice:
        raise ValidationError.from_exception_data(model.__name__, twice)


def check_whole_numbers(model: type[BaseModel], options: Any) -> None:
    """Raise `ValidationError` if an option is a whole number that cannot be stored."""
    most, least = (
        ("less_than_equal", {"le": WHOLE_NUMBERS[-1]}),
        ("greater_than_equal", {"ge": WHOLE_NUMBERS[0]}),
    )
    outsized = [
        as_details({"type": kind, "loc": (name,), "input": value, "ctx": bound})
        for name, value in vars(options).items()
        if isinstance(value, int)
        and value not in WHOLE_NUMBERS
        and model.model_fields[name].annotation is not Any
        for kind, bound in [most if value > 0 else least]
    ]
    if outsized:
        raise ValidationError.from_exception_data(model.__name__, outsized)


def explained(
    error: ValidationError,
    model: type[BaseModel],
    places: Iterable[tuple[str, str]],
    masked_field: Mapping[str, Callable[[Any], Any]],
) -> Exception:
    """Return a validation error with explanations of unknown options, and without secrets.

    Parameters
    ----------
    masked_field : mapping
        The options with secrets, each with a function that masks a value.
    """
    listed = list(places)

    def explain(found: Any) -> InitErrorDetails:
        found = {**found, "input": masked(_without_secrets(found["loc"], found["input"], masked_field))}
        if found["type"] == "enum":  # enum members have several names
            known = list(dict.fromkeys(re.findall(r"'[^']*'", found["ctx"]["expected"])))
            expected = " or ".join(filter(None, (", ".join(known[:-1]), known[-1])))
            found = {**found, "ctx": {"expected": expected}}
        if found["type"] != "extra_forbidden" or len(found["loc"]) != 1:
            return as_details(found)
        text = describe_unknown(str(found["loc"][0]), model.__name__, names_of(model), listed)
        return as_details({**found, "type": OPTION_NAME, "ctx": {"text": text}})

    return ValidationError.from_exception_data(error.title, [explain(each) for each in error.errors()])


def _without_secrets(
    place: tuple[int | str, ...], given: Any, masked_field: Mapping[str, Callable[[Any], Any]]
) -> Any:
    """Return the input that an error shows, of one option or of the whole model, without secrets."""
    if not place:
        if not isinstance(given, Mapping):
            return given
        return {
            name: masked_field[name](each) if name in masked_field else each for name, each in given.items()
        }
    name = str(place[0])
    if name in masked_field:
        return masked_field[name](given) if len(place) == 1 else HIDDEN
    # The name may be a misspelled option with a secret.
    return HIDDEN if difflib.get_close_matches(name, masked_field, 1) else given


def wrong_type(text: str) -> PydanticCustomError:
    """Return the error that a validator raises for a value of a wrong type."""
    return PydanticCustomError(WRONG_TYPE, "{text}", {"text": text})


def as_details(found: Any) -> InitErrorDetails:
    """Return one of `ValidationError.errors` in the form from which the error can be rebuilt."""
    context = found.get("ctx", {})
    kind = found["type"]
    if kind in (OPTION_NAME, WRONG_TYPE):
        kind = PydanticCustomError(kind, "{text}", context)
    details = InitErrorDetails(type=kind, loc=found["loc"], input=found["input"])
    if context and kind is found["type"]:
        details["ctx"] = context
    return details
