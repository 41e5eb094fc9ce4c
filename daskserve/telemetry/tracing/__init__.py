"""Traces by OpenTelemetry: the context that travels with requests, spans, and their export."""
