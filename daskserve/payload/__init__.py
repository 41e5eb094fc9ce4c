"""Values, code and errors as bytes, for sending them between processes."""
