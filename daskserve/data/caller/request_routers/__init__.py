"""Which replica gets a request, where an option or the user's own class decides that."""
