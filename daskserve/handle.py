"""Handles and their responses.

The names that start with ``Deployment`` are those of Ray Serve for the same classes.
"""

from __future__ import annotations

from typing import Any

from daskserve.data.caller.calls.broadcast import BroadcastResponse as DeploymentBroadcastResponse
from daskserve.data.caller.calls.handle import Handle
from daskserve.data.caller.calls.replica_choice import ReplicaSelection
from daskserve.data.caller.calls.response import Response
from daskserve.data.caller.calls.response_stream import ResponseGenerator
from daskserve.data.caller.calls.resuming import resume_stream
from daskserve.options.fields.ray_names import missing_name

__all__ = [
    "DeploymentBroadcastResponse",
    "DeploymentHandle",
    "DeploymentResponse",
    "DeploymentResponseGenerator",
    "Handle",
    "ReplicaSelection",
    "Response",
    "ResponseGenerator",
    "resume_stream",
]

DeploymentHandle = Handle
DeploymentResponse = Response
DeploymentResponseGenerator = ResponseGenerator


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
