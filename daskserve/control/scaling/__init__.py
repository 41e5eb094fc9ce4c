"""Autoscaling: collects metrics, calls the policies, and records their decisions."""
