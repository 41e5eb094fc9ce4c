"""Simulate autoscaling policies on recorded loads, with the code that the controller runs."""
