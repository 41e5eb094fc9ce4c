"""The names of options: the error for an unknown one names the nearest, and what replaces Ray Serve's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from daskserve.options.ray_names import INSTEAD, TRANSLATED
from daskserve.options.secrets import HIDDEN

#: Number of valid options that the error lists.
NEAREST = 3
#: The type of errors about the name of an option, beside pydantic's own types.
OPTION_NAME = "option_name"
#: The type of an error about a value of a wrong type, beside pydantic's own types.
WRONG_TYPE = "wrong_type"


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


def spellings_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the other names under which a model's options may be given, each with the preferred one."""
    found: dict[str, str] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            found |= {str(each): name for each in field.validation_alias.choices if each != name}
    return found | {theirs: ours for theirs, ours in TRANSLATED.items() if ours in model.model_fields}


def names_of(model: type[BaseModel]) -> list[str]:
    """Return the names under which a model's options may be given, the preferred ones first."""
    return [*model.model_fields, *spellings_of(model)]


def check_spellings(model: type[BaseModel], values: Mapping[str, Any]) -> None:
    """Raise `ValidationError` if an option is given under two of its names."""
    given: dict[str, str] = {}
    twice = []
    for spelling, name in {**{each: each for each in model.model_fields}, **spellings_of(model)}.items():
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


def explained(
    error: ValidationError,
    model: type[BaseModel],
    places: Iterable[tuple[str, str]],
    masked_field: Mapping[str, Callable[[Any], Any]],
) -> Exception:
    """Return a validation error whose unknown options are explained, without secrets.

    Parameters
    ----------
    masked_field : mapping
        The options with secrets, each with a function that returns what is shown of a value.
    """
    listed = list(places)

    def explain(found: Any) -> InitErrorDetails:
        found = {**found, "input": _without_secrets(found["loc"], found["input"], masked_field)}
        if found["type"] != "extra_forbidden" or len(found["loc"]) != 1:
            return as_details(found)
        text = describe_unknown(str(found["loc"][0]), model.__name__, names_of(model), listed)
        return as_details({**found, "type": OPTION_NAME, "ctx": {"text": text}})

    return ValidationError.from_exception_data(error.title, [explain(each) for each in error.errors()])


def _without_secrets(
    place: tuple[int | str, ...], given: Any, masked_field: Mapping[str, Callable[[Any], Any]]
) -> Any:
    """Return the input that an error shows, which is that of one option or of the whole model."""
    if not place:
        if not isinstance(given, Mapping):
            return given
        return {
            name: masked_field[name](each) if name in masked_field else each for name, each in given.items()
        }
    name = str(place[0])
    if name in masked_field:
        return masked_field[name](given) if len(place) == 1 else HIDDEN
    # It may be a misspelled one.
    return HIDDEN if difflib.get_close_matches(name, masked_field, 1) else given


def wrong_type(text: str) -> PydanticCustomError:
    """Return the error for a validator to raise that gets a value of a wrong type."""
    return PydanticCustomError(WRONG_TYPE, "{text}", {"text": text})


def has_wrong_type(error: ValidationError) -> bool:
    """Return whether an error is about a value of a wrong type, not one that is not allowed."""
    return any(each["type"].endswith(("_type", "_parsing")) for each in error.errors())


def as_details(found: Any) -> InitErrorDetails:
    """Return one of `ValidationError.errors`, as what the error can be made from again."""
    context = found.get("ctx", {})
    kind = found["type"]
    if kind in (OPTION_NAME, WRONG_TYPE):
        kind = PydanticCustomError(kind, "{text}", context)
    details = InitErrorDetails(type=kind, loc=found["loc"], input=found["input"])
    if context and kind is found["type"]:
        details["ctx"] = context
    return details
