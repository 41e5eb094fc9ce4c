"""Autoscaling policies, which are pure functions, and their argument and result types."""

from daskserve.autoscaling.context import (
    AutoscalingContext,
    CustomPolicy,
    Decision,
    Policy,
    Sample,
)
from daskserve.options.fields.bounds import Bounds

__all__ = ["AutoscalingContext", "Bounds", "CustomPolicy", "Decision", "Policy", "Sample"]
