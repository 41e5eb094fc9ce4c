"""The state as plain values for status, explanations, readiness and metrics. Pure."""
