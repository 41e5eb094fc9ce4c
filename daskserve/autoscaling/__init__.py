"""Autoscaling policies, which are pure functions, and the types they take and return."""

from daskserve.autoscaling.context import (
    AutoscalingContext,
    CustomPolicy,
    Decision,
    Policy,
    Sample,
)
from daskserve.options.fields.bounds import Bounds

__all__ = ["AutoscalingContext", "Bounds", "CustomPolicy", "Decision", "Policy", "Sample"]
