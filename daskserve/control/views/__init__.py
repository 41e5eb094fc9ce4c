"""The state as plain values: status, explanations, readiness and metrics. Pure."""
