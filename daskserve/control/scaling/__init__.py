"""Collect what autoscaling policies need, ask them, and apply their decisions."""
