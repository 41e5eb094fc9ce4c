"""Options of how requests find their way."""
