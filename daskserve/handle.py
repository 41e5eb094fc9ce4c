"""The classes of handles and responses under the names that Ray Serve has for them.

``from daskserve.handle import DeploymentHandle`` is for annotations in programs that move from Ray Serve; the
classes themselves have the shorter names of ``daskserve``.
"""

from __future__ import annotations

from typing import Any

from daskserve.data.caller.calls.broadcast import BroadcastResponse as DeploymentBroadcastResponse
from daskserve.data.caller.calls.handle import Handle as DeploymentHandle
from daskserve.data.caller.calls.replica_choice import ReplicaSelection
from daskserve.data.caller.calls.response import Response as DeploymentResponse
from daskserve.data.caller.calls.response_stream import ResponseGenerator as DeploymentResponseGenerator
from daskserve.options.fields.ray_names import missing_name

__all__ = [
    "DeploymentBroadcastResponse",
    "DeploymentHandle",
    "DeploymentResponse",
    "DeploymentResponseGenerator",
    "ReplicaSelection",
]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
