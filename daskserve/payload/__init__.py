"""Values, code and errors as bytes, on their way between processes."""
