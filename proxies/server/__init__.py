"""HTTP servers that run the ingress, on Tornado or on asyncio."""
