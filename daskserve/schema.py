"""The classes of the status under the names that Ray Serve has for them; `daskserve.status` returns them.

``from daskserve.schema import ServeStatus`` is for programs that move from Ray Serve.
"""

from __future__ import annotations

from typing import Any

from daskserve.client.views.status import ApplicationStatus as ApplicationStatusOverview
from daskserve.client.views.status import DeploymentStatus as DeploymentStatusOverview
from daskserve.client.views.status import Status as ServeStatus
from daskserve.options.ray_names import missing_name

__all__ = ["ApplicationStatusOverview", "DeploymentStatusOverview", "ServeStatus"]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
