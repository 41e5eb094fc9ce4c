"""The option ``model_repository``: a folder or bucket of models that replicas load while they serve."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from daskserve.options.base import Options


class ModelRepository(Options):
    """A folder of models in versions, ``NAME/VERSION/...``, which the replicas of a deployment load.

    The class of the deployment has ``load_model(name, version, path)``, whose result `daskserve.get_model`
    returns, and may have ``unload_model(name, version)``.
    """

    place: ClassVar[str] = "model_repository"

    url: str = Field(
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

    @field_validator("url")
    @classmethod
    def _is_absolute(cls, url: str) -> str:
        if "://" not in url and not url.startswith("/"):
            raise ValueError(
                f"{url!r} is a relative path, which means another folder on each worker; give an absolute "
                "path or a URL"
            )
        return url
