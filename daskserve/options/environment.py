"""The environment of a backend: its Python, packages, variables and files; its models; its Dask tasks.

The client checks the form. On the machine of the replica, `daskserve.data.replica.environment.interpreters`
finds the Python, `daskserve.data.replica.environment.packages` installs the packages, and
`daskserve.data.replica.environment.working_dir` unpacks the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, field_validator, model_validator

from daskserve.errors import BadRequestError
from daskserve.options.fields.base import Folder, Masked, Options, Secret, parse_typed
from daskserve.options.fields.secrets import each_hidden
from daskserve.options.rollout import RolloutConfig, percent_of


@dataclass(frozen=True, slots=True)
class CondaEnv:
    """A conda environment for a backend's replicas, identified by its name on their machines.

    Parameters
    ----------
    name : str
        Name in ``conda env list``; ``base`` is the installation's own environment.

    Raises
    ------
    BadRequestError
        A `ValueError`: the name is empty or a path.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"The name of a conda environment must be a string, got {self.name!r}")
        if not self.name or self.name != self.name.strip() or "/" in self.name:
            raise BadRequestError(
                f"{self.name!r} is not the name of a conda environment; to use a folder, pass its path: "
                "env='/path/to/environment'."
            )


class Environment(Options):
    """The environment of a backend's replicas, each of which then runs in its own process."""

    place: ClassVar[str] = "env"

    python: str | None = Field(
        None,
        description="Python to run: the name of a conda environment, or the absolute path of a conda "
        "environment or virtualenv, on the machines of the workers. None: the worker's Python.",
        validation_alias=AliasChoices("python", "conda", "venv"),
    )
    packages: list[str] = Field(
        default_factory=list,
        description="Requirements to install over the worker's packages, in pip's syntax, or the path of "
        "a ``requirements.txt``. Each machine installs them once, into a cached virtual environment, with "
        "uv if it is available, otherwise with pip.",
        validation_alias=AliasChoices("packages", "pip", "uv"),
    )
    env_vars: Annotated[dict[str, Secret], Masked(each_hidden)] = Field(
        default_factory=dict,
        description="Environment variables: values, or [references](SECURITY.md#secrets) to secrets.",
    )
    working_dir: str | None = Field(
        None,
        description="Folder or zip file, on your machine or at a URL that fsspec opens. It is unpacked "
        "for each replica, which uses it as its working directory and as the first entry of its import "
        "path.",
    )

    @field_validator("python", mode="before")
    @classmethod
    def _is_a_name_or_path(cls, value: Any) -> Any:
        return None if value is None else _python(value)

    @field_validator("env_vars")
    @classmethod
    def _can_be_set(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, text in value.items():
            if not name or "=" in name or "\0" in name:
                raise ValueError(
                    f"{name!r} is not the name of an environment variable: it must not be empty, and must "
                    "not contain '=' or a null character"
                )
            if isinstance(text, str) and "\0" in text:
                raise ValueError(
                    f"the value of {name} contains a null character, which environment variables cannot "
                    "contain"
                )
        return value

    @field_validator("packages", mode="before")
    @classmethod
    def _as_a_list(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            if set(value) - {"packages", "pip_check", "pip_version", "uv_version"} or "packages" not in value:
                raise ValueError(f"packages must be a list of requirements or a file of them, got {value!r}")
            return value["packages"]
        if isinstance(value, str | os.PathLike):
            try:
                text = Path(value).read_text()
            except OSError as error:
                raise ValueError(
                    f"{os.fspath(value)!r} is neither a list of requirements nor a readable file of "
                    f"requirements: {error.strerror}"
                ) from None
            lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
            return [line for line in lines if line and not line.startswith("#")]
        return value

    @model_validator(mode="after")
    def _packages_need_the_workers_python(self) -> Self:
        if self.packages and self.python is not None:
            raise ValueError(
                f"packages are installed over the worker's own packages, but python={self.python!r} names "
                "another environment; install them there, or leave one of the two out"
            )
        return self

    def to_text(self) -> str:
        """Return the environment as a string for `from_text`; equal environments have equal strings.

        The working directory is not included, because its files are sent with the code.
        """
        if self.python is not None and not self.env_vars:
            return self.python
        values = {"python": self.python, "packages": self.packages, "env_vars": self.env_vars}
        return json.dumps(values, sort_keys=True)

    def to_shown_text(self) -> str:
        """Return the string of `to_text` without the values of variables."""
        return self.model_copy(update={"env_vars": each_hidden(self.env_vars)}).to_text()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the environment that `to_text` wrote."""
        return cls(**json.loads(text)) if text.startswith("{") else cls(python=text)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter on this machine.

    Attributes
    ----------
    is_own : bool
        Whether this process runs the same interpreter, with the same packages.
    variables : mapping or None
        The environment variables of its processes; None means those of this process.
    first : tuple of str
        Folders that come first on the import path of another interpreter.
    """

    python: str
    prefix: str
    is_own: bool = True
    variables: Mapping[str, str] | None = field(default=None, repr=False)
    first: tuple[str, ...] = ()


def parse_environment(value: Any) -> Environment | None:
    """Return a user's ``env`` as options; None means the worker's environment.

    Parameters
    ----------
    value : Environment, dict, CondaEnv, str, path or None
        A name is a conda environment; a path is the folder of a virtualenv or conda environment.

    Raises
    ------
    TypeError, BadRequestError, pydantic.ValidationError
        The value is none of these, or its options are wrong.
    """
    if value is None:
        return None
    if isinstance(value, Mapping | Environment):
        return parse_typed(Environment, value, what="env")
    return Environment(python=_python(value))


def _python(value: Any) -> str:
    if isinstance(value, CondaEnv):
        return value.name
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"env must be an Environment or a dict of its options, a CondaEnv, the name of a conda "
            f"environment or the path of an environment, got {value!r}"
        )
    text = os.fspath(value)
    if not isinstance(text, str):
        raise TypeError(f"env must be text, got {value!r}")
    if os.sep not in text:
        return CondaEnv(text).name
    if not (os.path.isabs(text) or text.startswith("~")):
        raise BadRequestError(
            f"env must be an absolute path, because each worker resolves it separately; got {text!r}"
        )
    return text


class DaskTaskConfig(Options):
    """How Dask runs the tasks that the code of a replica submits with ``get_client()`` or ``compute()``."""

    place: ClassVar[str] = "dask_task_config"

    priority: int = Field(
        -1,
        description="Dask priority of tasks that set none. Tasks with a higher priority run first; tasks "
        "of other Dask clients have priority 0.",
    )
    cancel_with_request: bool = Field(
        True,
        description="Whether the unfinished tasks of a request are cancelled when the request is "
        "cancelled: by its caller, by its timeout, or by a disconnect of its client.",
    )


class ModelRepository(Options):
    """A folder of models in versions, ``NAME/VERSION/...``, which the replicas of a deployment load.

    The class of the deployment has ``load_model(name, version, path)``, whose result `daskserve.get_model`
    returns, and may have ``unload_model(name, version)``.
    """

    place: ClassVar[str] = "model_repository"

    url: Folder = Field(
        description="Folder of the models: a path on the workers, or a URL that fsspec opens, such as "
        "``s3://bucket/models``. Credentials are those of fsspec's configuration on the workers.",
        min_length=1,
    )
    mode: Literal["poll", "explicit"] = Field(
        "poll",
        description="What is loaded. ``poll``: the newest versions of all models in the folder, which is "
        "read regularly. ``explicit``: what ``client.load_model`` or ``daskserve models`` loads.",
    )
    poll_period_s: float = Field(
        10, ge=1, description="Interval in seconds at which the folder is read, with ``mode='poll'``."
    )
    keep_versions: int = Field(
        1, ge=1, description="Number of the newest versions of each model to load, with ``mode='poll'``."
    )
    load_timeout_s: float = Field(
        600,
        gt=0,
        description="Maximum time in seconds for a replica to fetch the files of a version, and then for "
        "``load_model`` to return. A version that takes longer has failed to load.",
    )
    rollout: RolloutConfig | None = Field(
        None,
        description="Plan by which a new version of a model gets its traffic step by step, with the gates "
        "of rollouts. ``sticky``, ``shadow`` and ``compare`` do not apply. None: a new version gets all "
        "traffic once it is loaded.",
    )

    @field_validator("rollout")
    @classmethod
    def _is_of_models(cls, rollout: RolloutConfig | None) -> RolloutConfig | None:
        if rollout is None:
            return None
        unused = [each for each in ("sticky", "compare") if getattr(rollout, each)]
        if percent_of(rollout.shadow):
            unused.append("shadow")
        if unused:
            raise ValueError(f"a model's rollout has no {' and no '.join(unused)}; leave it out")
        for gate in rollout.gates:
            if gate.metric == "prometheus" and "$version" not in gate.query:
                raise ValueError(
                    f"{gate.query!r} has the same value for both versions of a model, because the same "
                    "replicas serve both; add a label to your own metric, and select it with $version"
                )
        return rollout
