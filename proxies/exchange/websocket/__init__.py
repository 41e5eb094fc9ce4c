"""WebSockets: the session, the connection, and what it has received."""
