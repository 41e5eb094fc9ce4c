"""HTTP servers that carry the ingress: on Tornado, and on asyncio."""
