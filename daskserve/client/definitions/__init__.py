"""Deployments, their graph, and the specs that are sent to the controller."""
