"""Autoscaling policies: pure functions of what was measured, and what they are given and return."""

from daskserve.autoscaling.context import (
    AutoscalingContext,
    CustomPolicy,
    Decision,
    Policy,
    Sample,
)
from daskserve.options.bounds import Bounds

__all__ = ["AutoscalingContext", "Bounds", "CustomPolicy", "Decision", "Policy", "Sample"]
