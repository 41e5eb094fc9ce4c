"""The error for an unknown option: it names the valid ones, and daskserve's name for Ray Serve's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from daskserve.options.ray_names import INSTEAD, TRANSLATED
from daskserve.options.secrets import HIDDEN

#: The type of the error, beside pydantic's own.
UNKNOWN_OPTION = "unknown_option"


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
    similar = difflib.get_close_matches(name, known, 1)
    hint = ""
    if name in INSTEAD:
        hint = f" That is Ray Serve's name: {INSTEAD[name]}."
    elif elsewhere:
        hint = f" It belongs in {' or '.join(elsewhere)}."
    elif similar:
        hint = f" Did you mean '{similar[0]}'?"
    return f"{model} has no option '{name}'.{hint} Its options are: {', '.join(known)}."


def names_of(model: type[BaseModel]) -> list[str]:
    """Return the names under which a model's options may be given, the preferred ones first."""
    others: list[str] = []
    for name, field in model.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            others += [each for each in field.validation_alias.choices if each != name]  # type: ignore[misc]
    return [
        *model.model_fields,
        *others,
        *(theirs for theirs, ours in TRANSLATED.items() if ours in model.model_fields),
    ]


def explained(
    error: ValidationError,
    model: type[BaseModel],
    places: Iterable[tuple[str, str]],
    concealed: Mapping[str, Callable[[Any], Any]],
) -> Exception:
    """Return a validation error whose unknown options are explained, without secrets.

    Parameters
    ----------
    concealed : mapping
        The options with secrets, each with a function that returns what is shown of a value.
    """
    listed = list(places)

    def explain(found: Any) -> InitErrorDetails:
        found = {**found, "input": _without_secrets(found["loc"], found["input"], concealed)}
        if found["type"] != "extra_forbidden" or len(found["loc"]) != 1:
            return as_details(found)
        text = describe_unknown(str(found["loc"][0]), model.__name__, names_of(model), listed)
        return as_details({**found, "type": UNKNOWN_OPTION, "ctx": {"text": text}})

    return ValidationError.from_exception_data(error.title, [explain(each) for each in error.errors()])


def _without_secrets(
    place: tuple[int | str, ...], given: Any, concealed: Mapping[str, Callable[[Any], Any]]
) -> Any:
    """Return the input that an error shows, which is that of one option or of the whole model."""
    if not place:
        if not isinstance(given, Mapping):
            return given
        return {name: concealed[name](each) if name in concealed else each for name, each in given.items()}
    name = str(place[0])
    if name in concealed:
        return concealed[name](given) if len(place) == 1 else HIDDEN
    # It may be a misspelled one.
    return HIDDEN if difflib.get_close_matches(name, concealed, 1) else given


def as_details(found: Any) -> InitErrorDetails:
    """Return one of `ValidationError.errors`, as what the error can be made from again."""
    context = found.get("ctx", {})
    kind = found["type"]
    if kind == UNKNOWN_OPTION:
        kind = PydanticCustomError(UNKNOWN_OPTION, "{text}", context)
    details = InitErrorDetails(type=kind, loc=found["loc"], input=found["input"])
    if context and kind is found["type"]:
        details["ctx"] = context
    return details
