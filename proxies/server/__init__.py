"""HTTP servers that carry the ingress: Tornado, and uvicorn."""
