"""Request routers: built-in ones, and those of the user, which choose the replica for a request."""
