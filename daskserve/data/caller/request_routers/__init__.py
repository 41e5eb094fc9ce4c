"""Request routers, which choose the replica for a request: built-in ones and users' own."""
