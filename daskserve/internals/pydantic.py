"""The undocumented parts of pydantic that daskserve uses."""

from __future__ import annotations

from typing import Any

from daskserve.internals.checking import needs

with needs("pydantic", ">=2.8,<3") as check:
    import pydantic
    from pydantic._internal._model_construction import (
        build_lenient_weakvaluedict,
        unpack_lenient_weakvaluedict,
    )

    check.attributes(pydantic.BaseModel, "__pydantic_complete__", "__pydantic_parent_namespace__")
    check.parameters(build_lenient_weakvaluedict, "d")
    check.parameters(unpack_lenient_weakvaluedict, "d")

#: The attribute in which a model keeps the variables of the function that defines it.
NAMESPACE = "__pydantic_parent_namespace__"


def needed_namespace(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Return the attribute `NAMESPACE` with the variables that a model may still need; empty if none.

    A model that a function defines keeps all variables of that function, in order to resolve annotations that
    name other types. A complete model has already resolved its annotations; an incomplete one needs only the
    types.
    """
    names = unpack_lenient_weakvaluedict(model.__pydantic_parent_namespace__)
    if model.__pydantic_complete__ or names is None:
        return {}
    return {NAMESPACE: build_lenient_weakvaluedict({k: v for k, v in names.items() if isinstance(v, type)})}
